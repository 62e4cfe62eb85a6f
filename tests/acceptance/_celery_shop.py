"""A shop's Celery tasks with one line of Relatum's; as a program it places orders, and prints their first ids."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, group

import relatum
from relatum.keys import preset

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=f"file://{os.environ['SHOP_RESULTS']}")
app.conf.update(task_default_queue=os.environ["SHOP_QUEUE"], broker_connection_retry_on_startup=True)
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1)
relatum.intercept(app, database=os.environ["SHOP_DATABASE"], keys=preset("celery"), copy_to="celery.tasks")


@app.task(name="shop.reserve", bind=True, max_retries=5, default_retry_delay=0)
def reserve(self: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Goes well at the third try where the goods are scarce."""
    if order.get("is_scarce") and self.request.retries < 2:
        raise self.retry()
    return order


@app.task(name="shop.charge")
def charge(order: dict[str, Any]) -> dict[str, Any]:
    """Has a mail sent; fails where the card is refused. Once, a process is killed here."""
    if order.get("is_refused"):
        raise ValueError("the card is refused")
    mark = Path(os.environ["SHOP_RESULTS"]) / f"killed-{order['id']}"
    if order.get("kills") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    notify.delay(order["id"])
    return order


@app.task(name="shop.notify")
def notify(order_id: str) -> str:
    return order_id


@app.task(name="shop.pack")
def pack(order: dict[str, Any], item: str) -> str:
    return f"{order['id']}/{item}"


@app.task(name="shop.ship")
def ship(boxes: list[str]) -> int:
    return len(boxes)


@app.task(name="shop.audit")
def audit(number: int) -> int:
    return number


def place(order: dict[str, Any]) -> Any:
    """One order: a chain, and a chord at its end."""
    boxes = [pack.s(item) for item in order["items"]]
    return chain(reserve.s(order), charge.s(), chord(boxes, ship.s())).apply_async()


def main() -> None:
    orders = json.loads(sys.argv[1])
    placed = [(place(order), order) for order in orders]
    audits = group(audit.s(number) for number in range(3)).apply_async()
    told = {}
    for last, order in placed:
        if order.get("is_refused"):
            last.parent.parent.get(timeout=200, propagate=False)
        else:
            assert last.get(timeout=200) == len(order["items"])
        first = last
        while first.parent is not None:
            first = first.parent
        told[order["id"]] = first.id
    assert audits.get(timeout=200) == [0, 1, 2]
    print(json.dumps({"orders": told, "audits": [result.id for result in audits.results]}))


if __name__ == "__main__":
    main()
