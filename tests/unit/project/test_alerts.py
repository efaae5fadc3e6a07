"""The alerts for Prometheus, and the settings that the how-to page shows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks

ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
PAGE = ROOT / "docs/how-to/monitor.md"
#: Two devices; one is down from the start, and every second answer is by the deadline no answer.
STORY = f"""\
rule_files: [{ALERTS}]
tests:
  - interval: 1m
    input_series:
      - {{series: 'mdp_device_up{{model="m", device="a"}}', values: "0x20"}}
      - {{series: 'mdp_device_up{{model="m", device="b"}}', values: "1x20"}}
      - {{series: 'mdp_device_in_use{{model="m", device="a"}}', values: "1x20"}}
      - {{series: 'mdp_device_in_use{{model="m", device="b"}}', values: "1x20"}}
      - {{series: 'mdp_requests_total{{model="m", outcome="answered"}}', values: "0+60x20"}}
      - {{series: 'mdp_requests_total{{model="m", outcome="deadline"}}', values: "0+60x20"}}
      - {{series: 'mdp_member_late_total{{model="m", device="a"}}', values: "0+6x30"}}
      - {{series: 'mdp_member_late_total{{model="m", device="b"}}', values: "0+1x30"}}
      - {{series: 'mdp_camera_suspect{{model="m", device="a", why="frozen"}}', values: "1x20"}}
      - {{series: 'mdp_camera_suspect{{model="m", device="b", why="frozen"}}', values: "0x20"}}
    alert_rule_test:
"""
FIRES = """\
      - eval_time: 20m
        alertname: {name}
        exp_alerts: [{{exp_labels: {{{labels}}}, exp_annotations: {{summary: "{summary}"}}}}]
"""


def promtool(*words: str | Path) -> str:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        ["promtool", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_fire_for_the_device_that_is_meant(tmp_path: Path) -> None:
    down = "m: a cannot answer; mdp doctor says why."
    late = "m: over 5 % of the answers lack a, which was late."
    device = "severity: ticket, model: m, device: a"
    camera = "m: the camera of a is covered, turned, moved or frozen."
    none = "m: requests had no answer by their deadline."
    (tmp_path / "story.yaml").write_text(
        STORY
        + FIRES.format(name="DeviceDown", labels=device, summary=down)
        + FIRES.format(name="DeviceLate", labels=device, summary=late)
        + FIRES.format(name="CameraSuspect", labels=device, summary=camera)
        + FIRES.format(name="NoAnswers", labels="severity: page, model: m", summary=none)
    )
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "story.yaml")


def test_the_settings_that_are_shown_are_read(tmp_path: Path) -> None:
    (shown,) = blocks(PAGE, "yaml")
    (tmp_path / "prometheus.yml").write_text(shown)
    shutil.copy(ALERTS, tmp_path)
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_every_alert_is_explained_and_every_metric_exists() -> None:
    rules, page = ALERTS.read_text(), PAGE.read_text()
    exported = (ROOT / "mdp/gateway/metrics.py").read_text()
    named = set(re.findall(r"\bmdp_[a-z_]+", rules + page))
    bare = {re.sub(r"_(total|bucket)$", "", name) for name in named}
    assert len(bare) > 5
    assert {name for name in bare if f'"{name}"' not in exported} == set()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == alerts
