"""How many things a member should have of those that members share. Pure; all come to it by the same rows."""

from collections.abc import Mapping


def target(held: Mapping[str, int], member: str, things: int) -> int:
    """How many a member should have, so that no two members differ by more than one.

    Members that have more already keep them before those that have fewer, so that as few as can be change hands.

    `held`: How many each member has whose lease holds; this one among them.
    """
    share, extra = divmod(things, len(held))
    ranked = sorted(held, key=lambda each: (-held[each], each))
    return share + (ranked.index(member) < extra)
