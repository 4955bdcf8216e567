"""The Grafana dashboard: every recorded metric has its panel, under Ray's name for it, in Grafana's JSON model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer.metrics import RECORDED

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "make_dashboard.py"
# What Grafana's own schemas (grafana-foundation-sdk: dashboard, timeseries, prometheus) require and
# allow of the fields that we write. The whole file was also checked against those schemas.
OPTIONS = {
    "type": "object",
    "required": ["legend", "tooltip"],
    "properties": {
        "legend": {
            "required": ["displayMode", "placement", "showLegend", "calcs"],
            "properties": {
                "displayMode": {"enum": ["list", "table", "hidden"]},
                "placement": {"enum": ["bottom", "right"]},
                "showLegend": {"type": "boolean"},
                "calcs": {"type": "array", "items": {"type": "string"}},
            },
            "additionalProperties": False,
        },
        "tooltip": {
            "required": ["mode", "sort"],
            "properties": {"mode": {"enum": ["single", "multi", "none"]}, "sort": {"enum": ["asc", "desc", "none"]}},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos", "datasource", "targets", "fieldConfig", "options"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "timeseries"},
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "properties": {"x": {"type": "integer", "maximum": 23}, "w": {"type": "integer", "maximum": 24}},
        },
        "datasource": {"type": "object", "required": ["type", "uid"]},
        "options": OPTIONS,
        "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "required": ["refId", "expr"],
                "properties": {"refId": {"type": "string"}, "expr": {"type": "string"}},
            },
        },
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "time", "templating", "annotations"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "annotations": {"type": "object", "properties": {"list": {"type": "array"}}, "additionalProperties": False},
        "panels": {"type": "array", "items": PANEL},
        "templating": {"required": ["list"], "properties": {"list": {"items": {"required": ["name", "type"]}}}},
    },
}


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("dashboard") / "deepinfer.json"
    subprocess.run([sys.executable, str(SCRIPT), "-o", str(path)], check=True, cwd=SCRIPT.parent.parent, timeout=60)
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_it_is_a_dashboard(dashboard: dict[str, Any]) -> None:
    jsonschema.validate(dashboard, DASHBOARD)
    ids = [panel["id"] for panel in dashboard["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(ids)) == len(set(places)) == len(ids)


@pytest.mark.parametrize("metric", RECORDED, ids=lambda metric: metric.name)
def test_every_metric_has_its_panel(dashboard: dict[str, Any], metric: Any) -> None:
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[metric.kind]
    [panel] = [panel for panel in dashboard["panels"] if panel["description"].startswith(f"{metric.name} (")]
    for target in panel["targets"]:
        assert f"ray_{metric.name}{suffix}{{" in target["expr"]
        assert all(tag in target["expr"] and tag in target["legendFormat"] for tag in ("role", *metric.tags))
