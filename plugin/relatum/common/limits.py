"""All limits of the kernel, with units and origins."""

from typing import Final

KEY_VALUE_BYTES_MAX: Final = 1024
"""Bytes of a key's value in UTF-8. An entry of a PostgreSQL B-tree has at most 2,704 bytes, all columns included."""

KEY_NAME_BYTES_MAX: Final = 255
"""Bytes of a key's name. AMQP 0.9.1 field names are short strings."""

KEYS_MAX: Final = 256
"""Key definitions in force at one time. The recorder applies all of them to each message."""

HEADERS_MAX: Final = 1024
"""Header values of one message, including nested ones. The broker accepts 5,000; readers become slow long before."""

HEADERS_DEPTH_MAX: Final = 16
"""Levels of nested tables and arrays in headers. pika and aio-pika crash at 900 to 2,000 levels when reading."""

HEADERS_BYTES_MAX: Final = 122_880
"""Encoded bytes of all headers. A header frame over 131,064 bytes makes the broker close the connection."""

MESSAGE_BYTES: Final = 512
"""Approximate bytes in memory of a message's Python objects, without its record. An empty message counts as many."""

TIME_US_MIN: Final = -62_135_596_800_000_000
"""Microseconds since 1970, UTC: 0001-01-01, the first moment `datetime` can hold."""

TIME_US_MAX: Final = 253_402_300_799_999_999
"""Microseconds since 1970, UTC: the end of 9999-12-31, the last moment `datetime` can hold."""

INTEGER_MIN: Final = -(2**63)
"""The smallest value of an integer key: AMQP and PostgreSQL both have 64-bit signed integers."""

INTEGER_MAX: Final = 2**63 - 1
"""The largest value of an integer key."""

RECORDER_CONNECTIONS_MAX: Final = 4
"""Default maximum of a recorder's connections to PostgreSQL. A dozen recorders fit into the server's default of 100."""

TIME_BLOCK_MESSAGES_MAX: Final = 128
"""Messages that one entry of the time index covers. Reading them takes about as long as subscribing at an offset."""

TIME_BLOCK_DISORDER_US_MAX: Final = 1_000_000
"""Microseconds that one entry of the time index may span if its messages are not in the order of their times."""

GROUP_ID_BYTES: Final = 24
"""Bytes of a message group's id, as in IBM MQ: `MQBYTE24`."""

GROUP_SEQUENCE_MAX: Final = 999_999_999
"""The highest number of a message in its group, as in IBM MQ: `MsgSeqNumber`."""

PARTITIONS_MAX: Final = 1000
"""Partitions of a super stream: RabbitMQ's limit, in versions that have one: `stream.max_super_stream_partitions`."""
