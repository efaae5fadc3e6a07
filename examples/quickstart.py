"""Ask a running fleet what pictures show.

python examples/quickstart.py fleet.toml cat.jpg dog.jpg

Beyond one machine both sides need keys (docs/how-to/keys.md). A fleet file made with
`mdp fleet new --keys keys/ --key keys/client.secret` names them, and nothing changes here.
"""

import sys

import mdp


def main(fleet: str, *pictures: str) -> None:
    """Print one line per picture; a picture without an answer says why."""
    with mdp.Client.connect(fleet) as client:
        for picture in pictures:
            try:
                answer = client.classify(picture, deadline_ms=500)
            except (mdp.InferenceError, mdp.PictureError) as error:
                print(f"{picture}: {error}")
                continue
            print(f"{picture}: {answer.label} ({answer.probability:.0%}), {answer.mode}")
            print(f"  used {', '.join(answer.used)} in {answer.latency_ms:.1f} ms")
            for device, reason in answer.missing.items():
                print(f"  missing {device}: {reason}")
            if answer.expected_accuracy is not None:
                print(
                    f"  this combination was right on {answer.expected_accuracy:.1%} of "
                    f"{answer.expected_accuracy_pictures} test pictures"
                )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: quickstart.py FLEET PICTURE...")
    main(*sys.argv[1:])
