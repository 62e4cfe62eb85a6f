"""The user a private PostgreSQL runs as when root starts it."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relatum.errors import ServerStartFailed

NAMES: Final = ("postgres", "nobody")
"""Users to run as, in order of preference. initdb wants one that has a name."""

CAPABILITIES: Final = ("dac_read_search", "dac_override")
"""Capabilities that let a process pass through directories closed to its user, the weaker one first. Containers
usually have the second only."""


@dataclass(frozen=True)
class Account:
    """Who a program runs as: this process's own user, or another one that root changes to."""

    user: pwd.struct_passwd | None = None
    capability: str | None = None

    @classmethod
    def choose(cls, owner: int | None, *, must_reach: Sequence[Path]) -> "Account":
        """Return the user for a program that refuses root.

        Args:
            owner: The id of the user whose files it works on; None where there are none yet.
            must_reach: Paths that user must be able to reach. Checkouts and virtual environments below /root, and
                pytest's temporary directories, are closed to other users; the program then gets a capability that
                opens them. Its password keeps other users from using that.

        Raises:
            ServerStartFailed: There is no such user, or it cannot reach the paths by any of these ways.
        """
        if os.geteuid() != 0:
            return cls()
        if shutil.which("setpriv") is None:
            raise ServerStartFailed(
                "PostgreSQL refuses to run as root, and changing the user needs `setpriv` (package util-linux). "
                "Install it, or run as another user."
            )
        user = _user(owner)
        for account in (cls(user), *(cls(user, capability) for capability in CAPABILITIES)):
            if account.reaches(must_reach):
                return account
        raise ServerStartFailed(
            f"PostgreSQL refuses to run as root, and user {user.pw_name} cannot reach {must_reach[-1]}. "
            "Choose a directory that other users can enter, or run as another user."
        )

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command that runs a program as this user."""
        if self.user is None:
            return [program, *arguments]
        setpriv = shutil.which("setpriv") or "/usr/bin/setpriv"
        options = [f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}", "--clear-groups"]
        if self.capability is not None:
            # Without the securebit access(2), which PostgreSQL finds its own programs by, ignores capabilities.
            options += ["--securebits=+no_setuid_fixup", f"--inh-caps=-all,+{self.capability}"]
            options += [f"--ambient-caps=+{self.capability}"]
        return [setpriv, *options, program, *arguments]

    def own(self, path: Path) -> None:
        """Give a file or directory to this user."""
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def reaches(self, paths: Sequence[Path]) -> bool:
        """Whether this user can enter the directories above all of the paths, and read the files among them."""
        tests = " && ".join(f'test -e "${number}"' for number in range(1, len(paths) + 1))
        shell = self.command("/bin/sh", "-c", tests, "sh", *(str(path) for path in paths))
        return subprocess.run(shell, capture_output=True, check=False, cwd="/").returncode == 0


def _user(owner: int | None) -> pwd.struct_passwd:
    if owner is not None and owner != 0:
        return pwd.getpwuid(owner)
    for name in NAMES:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServerStartFailed("PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it as.")
