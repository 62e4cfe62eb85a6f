"""Messages as clients give them to who consumes, taken as they are by look-ups. No input or output.

No client is imported here: who has such a message has imported it. See docs/adr/0036.
"""

from relatum_consumer.consumed._in_hand import Consumed, InHand, in_hand

__all__ = ["Consumed", "InHand", "in_hand"]
