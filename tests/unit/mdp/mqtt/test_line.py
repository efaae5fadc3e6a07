"""Topics of a line's triggers."""

import pytest

from mdp.errors import InputError
from mdp.mqtt.broker import Place
from mdp.mqtt.line import LineBroker, check_topic


@pytest.mark.parametrize("topic", ["belt", "belt/item", "belt/+/item", "belt/#", "+", "#", "/"])
def test_topics_and_filters(topic: str) -> None:
    check_topic(topic)


@pytest.mark.parametrize("topic", ["", "belt/#/item", "belt#", "a+/b", "a\0b", "x" * 65_536])
def test_what_is_no_topic(topic: str) -> None:
    with pytest.raises(InputError, match="expected a topic, or a filter of topics"):
        check_topic(topic)


@pytest.mark.parametrize("topic", ["#", "mdp/+/items", "mdp/belt/items"])
def test_records_are_no_triggers(topic: str) -> None:
    with pytest.raises(InputError, match="expected another topic than mdp/belt/items"):
        LineBroker(
            Place(host="home", port=1883), "belt", topic=topic, trigger=lambda payload: None,
            report=lambda text: None,
        )  # fmt: skip
