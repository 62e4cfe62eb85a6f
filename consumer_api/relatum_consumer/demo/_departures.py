"""What the demo expects: that after each weather report of an airport a flight leaves there in the hour it is of."""

from datetime import UTC, datetime
from typing import Final

import pandas as pd

from relatum.reading import Message
from relatum_consumer import Relations
from relatum_consumer.demo._asking import Difference
from relatum_consumer.demo._data import FLIGHTS, WEATHER, Dataset
from relatum_consumer.demo._publish import Servers
from relatum_consumer.expectations import Expectation, MissingReport, add_expectations

WITHIN_S: Final = 3_600.0

_MOST: Final = 100_000
"""Reports that are compared: more than there are."""


def expect_departures(servers: Servers) -> Expectation:
    """Define it in the database."""
    weather, flights = servers.stream(WEATHER), servers.stream(FLIGHTS)
    expectation = Expectation(servers.stream("departures"), weather, "airport_hour", flights, WITHIN_S)
    add_expectations(servers.database, expectation, vhost=servers.address.vhost)
    return expectation


def check_departures(
    relations: Relations, data: Dataset, expectation: Expectation
) -> tuple[MissingReport, list[Difference]]:
    """Ask which reports no flight has followed, while there were flights at all, and compare with the data frames."""
    since, until = data.flights["time_us"].iloc[0], data.flights["time_us"].iloc[-1]
    report = relations.missing(expectation, since=_moment(since), until=_moment(until), limit=_MOST)
    unmet = [*report.late, *report.missing, *report.not_known]
    answered = {
        str(message.properties.message_id) if isinstance(message, Message) else str(each.id): each.finding.value
        for each, message in zip(unmet, relations.read_many(each.id for each in unmet), strict=True)
    }
    expected = _by_frame(data, int(since), int(until))
    differences = [
        Difference(name, expectation.meaning, expected.get(name), answered.get(name), "relatum")
        for name in sorted(expected.keys() | answered.keys())
        if expected.get(name) != answered.get(name)
    ]
    return report, differences


def _by_frame(data: Dataset, since: int, until: int) -> dict[str, str]:
    """What the data frames say: the reports, by `message_id`, that a flight followed too late, or none."""
    reports = data.weather[(data.weather["time_us"] >= since) & (data.weather["time_us"] < until)]
    pairs = reports.merge(data.flights, on=["origin", "time_hour"], how="left", suffixes=("", "_of_flight"))
    pairs = pairs[pairs["time_us_of_flight"].isna() | (pairs["time_us_of_flight"] >= pairs["time_us"])]
    first = pairs.groupby("message_id")["time_us_of_flight"].min()
    reports = reports.set_index("message_id")
    waited_us = first.reindex(reports.index) - reports["time_us"]
    return {
        str(name): "missing" if pd.isna(waited) else "late"
        for name, waited in waited_us.items()
        if pd.isna(waited) or waited > WITHIN_S * 1e6
    }


def _moment(time_us: int) -> datetime:
    return datetime.fromtimestamp(int(time_us) / 1e6, UTC)
