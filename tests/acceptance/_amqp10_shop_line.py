"""The shop with one line more: in a user's program it stands behind `dial()`."""

import os
import sys

from rabbitmq_amqp_python_client import Environment

import relatum
from relatum.keys import KeyDefinition
from tests.acceptance._amqp10_shop import run

KEYS = [
    KeyDefinition("order_id"),
    KeyDefinition("id", source="property:message_id"),
    KeyDefinition("cause", source="property:correlation_id", names="id"),
    KeyDefinition("customer", source="body:$.order.customer"),
]

if __name__ == "__main__":
    url, orders, payments = sys.argv[1:4]
    with Environment(uri=url) as environment:
        connection = environment.connection()
        connection.dial()
        relatum.intercept(connection, database=os.environ["SHOP_DATABASE"], keys=KEYS)
        run(connection, orders, payments)
        relatum.release(connection)
