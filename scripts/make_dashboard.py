"""Write a Grafana dashboard for the metrics of this package: `python scripts/make_dashboard.py > deepinfer.json`.

Panels are made from what is recorded of the table in `deepinfer.metrics`, so names can't drift. Ray's exporter puts
`ray_` in front of a name and `_total` behind a counter. Ray also tags every series with the worker that sent it, and a
restarted rank is a new worker: panels therefore sum over everything but `role` and `rank`. Fields are those of
Grafana's own schemas of a dashboard, a time series panel and a Prometheus query (grafana-foundation-sdk).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deepinfer.metrics import RECORDED, Metric

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 12, 8
_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}
_SELECTOR = '{role=~"$role"}'
_RATE = "$__rate_interval"


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's JSON model."""
    panels = [_acceptance(0), *(_panel(metric, number + 1) for number, metric in enumerate(RECORDED))]
    return {
        "title": "deepinfer",
        "uid": "deepinfer",
        "tags": ["deepinfer", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource_variable(), _role_variable()]},
        "panels": panels,
    }


def exported_name(metric: Metric) -> str:
    """Return the name under which Prometheus finds the metric."""
    return f"ray_{metric.name}{'_total' if metric.kind == 'counter' else ''}"


def _panel(metric: Metric, number: int) -> dict[str, Any]:
    by = ", ".join(("role", "rank", *metric.tags))
    legend = " ".join(f"{{{{{tag}}}}}" for tag in ("role", "rank", *metric.tags))
    name = exported_name(metric)
    unit = _UNITS.get(metric.unit, "short")
    title = metric.help
    if metric.kind == "gauge":
        expressions = [(f"max by ({by}) ({name}{_SELECTOR})", legend)]
    elif metric.kind == "counter":
        expressions = [(f"sum by ({by}) (rate({name}{_SELECTOR}[{_RATE}]))", legend)]
        title, unit = f"{metric.help}, per second", "short"
        if metric.unit == "bytes":
            unit = "Bps"
    else:
        by = ", ".join(("le", "role", *metric.tags))
        legend = " ".join(f"{{{{{tag}}}}}" for tag in ("role", *metric.tags))
        bucket = f"sum by ({by}) (rate({name}_bucket{_SELECTOR}[{_RATE}]))"
        expressions = [(f"histogram_quantile({q}, {bucket})", f"p{int(100 * q)} {legend}") for q in (0.5, 0.99)]
    return _graph(number, title, f"{metric.name} ({metric.unit})", unit, expressions)


def _acceptance(number: int) -> dict[str, Any]:
    """The one panel that divides two metrics."""
    accepted, drafted = (
        f"sum by (role) (rate(ray_deepinfer_{name}_tokens_total{_SELECTOR}[{_RATE}]))"
        for name in ("accepted", "drafted")
    )
    title = "Share of verified drafts that were accepted"
    return _graph(number, title, "accepted / drafted", "percentunit", [(f"{accepted} / {drafted}", "{{role}}")])


def _graph(number: int, title: str, description: str, unit: str, expressions: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": _WIDTH * (number % 2), "y": _HEIGHT * (number // 2), "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(expressions)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _role_variable() -> dict[str, Any]:
    return {
        "name": "role",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": "label_values(ray_deepinfer_requests_running, role)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> None:
    """Write the dashboard to a file or to stdout."""
    parser = argparse.ArgumentParser(description="Write a Grafana dashboard for deepinfer's metrics.")
    parser.add_argument("-o", "--output", type=Path, help="file to write (default: stdout)")
    text = json.dumps(make_dashboard(), indent=2) + "\n"
    output: Path | None = parser.parse_args().output
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
