"""How the JVMs of the tests are started."""

from typing import Final

QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for a minute on two cores: compile once, collect with one thread."""

JVM_VARIABLES: Final = {"JDK_JAVA_OPTIONS": QUICK_START}
"""The same for a JVM that a program under test starts: the variable is read by `java` itself."""
