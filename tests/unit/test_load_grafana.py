"""The dashboard's queries as Grafana would send them, and what counts as an empty panel."""

from typing import Any

import pytest

from load_tests.client import TargetError
from load_tests.grafana.command import empty, unhealthy
from load_tests.grafana.dashboard import Choice, Query, choices, queries, read
from load_tests.grafana.prometheus import CONFIGURATION, Rule, configuration

INSTANCE = {
    **{"name": "instance", "type": "query", "includeAll": True, "allValue": ".*"},
    "query": {"query": "label_values(up, instance)"},
}


def dashboard(*expressions: str) -> dict[str, Any]:
    targets = [{"expr": expression} for expression in expressions]
    panel = {"type": "timeseries", "title": "A panel", "targets": targets}
    folded = {"type": "row", "title": "A row", "panels": [panel]}
    return {"templating": {"list": [INSTANCE]}, "panels": [folded]}


def test_variables_are_filled_in_also_below_a_folded_row() -> None:
    found = queries(dashboard('rate(a{i=~"$instance"}[$__rate_interval])', "${instance}"), "4s")
    assert found == [Query("A panel", 'rate(a{i=~".*"}[4s])'), Query("A panel", ".*")]
    assert choices(dashboard()) == [Choice("instance", "up", "instance")]


@pytest.mark.parametrize("expressions", [(), ("rate(a[$interval])",)])
def test_a_panel_that_cannot_be_asked_is_an_error(expressions: tuple[str, ...]) -> None:
    with pytest.raises(TargetError):
        queries(dashboard(*expressions), "4s")


def test_no_query_of_ours_has_a_variable_left() -> None:
    found = queries(read(), "4s")
    assert len(found) >= len(read()["panels"])
    assert not [query for query in found if "$" in query.expression]


def test_a_panel_with_nothing_but_zeros_is_empty() -> None:
    one, other, third = Query("one", "a"), Query("other", "b"), Query("third", "c")
    problems = list(empty([(one, [0.0, 2.0]), (other, [0.0]), (third, [])]))
    assert problems == ["other: nothing but 0: b", "third: no data: c"]
    preempted = Query("pressure", "rate(rootstock_preemptions_total[4s])")
    assert not list(empty([(preempted, [0.0])]))
    assert len(list(empty([(preempted, [])]))) == 1


def test_an_alert_must_have_been_evaluated() -> None:
    assert list(unhealthy([Rule("fine", "ok", "")])) == []
    assert list(unhealthy([Rule("bad", "err", "why")])) == ["the alert bad is err: why"]
    assert list(unhealthy([])) == ["there are no alerts"]


def test_the_configuration_is_ours_but_for_the_daemon_and_the_haste() -> None:
    written = configuration("127.0.0.1:9")
    (job,) = written["scrape_configs"]
    assert (job["job_name"], job["scrape_interval"]) == ("rootstock", "1s")
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9"]}]
    assert written["rule_files"] == [str(CONFIGURATION.parent / "alerts.yml")]
