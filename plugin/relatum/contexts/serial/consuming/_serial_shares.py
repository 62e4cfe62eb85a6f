"""Which partitions a member of a serial consumer should have. Pure; all members come to it by the same rows."""

from collections.abc import Mapping


def target(held: Mapping[str, int], member: str, partitions: int) -> int:
    """How many partitions a member should have, so that no two members differ by more than one.

    Members that have more already keep them before those that have fewer, so that as few as can be change hands.

    Args:
        held: How many partitions each member has whose lease holds; this one among them.
        member: Whose number is asked for.
        partitions: How many there are.
    """
    share, extra = divmod(partitions, len(held))
    ranked = sorted(held, key=lambda each: (-held[each], each))
    return share + (ranked.index(member) < extra)
