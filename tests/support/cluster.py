"""Three RabbitMQ nodes on loopback, for what one node cannot show: leaders, replicas, and what fails between them.

Each has an address of its own within 127.0.0.0/8 for Erlang's distribution: no epmd is shared with others.
"""

import json
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import pytest

from relatum.errors import RelatumError
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.wire import frames
from relatum.wire.frames import StreamPlaces
from tests.support._streams import declare_stream, make_streams_survive, server_version
from tests.support._waiting import START_S, wait_until
from tests.support.ports import STREAM_OFFSET, Identity, free_port
from tests.support.rabbitmq_tools import change_stopped, erl_call, run_tool

NODES: Final = (1, 2, 3)

SETTLE_S: Final = 240.0
"""Seconds a cluster may take to agree again after a fault."""

_READERS: Final = (
    "[P || {_, P, _, _} <- rpc:call(N, supervisor, which_children, [osiris_replica_reader_sup]), is_pid(P), "
)
"""The processes that send a stream from its leader's node N to a replica, by their supervisor; a filter follows."""


class ClusterNode(LocalRabbitMQ):
    """One node of a `Cluster`."""

    name = "RabbitMQ node"
    _port_offsets: ClassVar[Sequence[int]] = (0, STREAM_OFFSET)

    def __init__(self, cluster: "Cluster", number: int) -> None:
        super().__init__(cluster.directory / f"r{number}", start_timeout_s=START_S)
        self._cluster = cluster
        self.number = number

    def _choose_ports(self) -> None:
        file = self.directory / "identity.json"
        if not file.exists():
            identity = {"port": free_port(self._port_offsets), "password": self._cluster.password}
            file.write_text(json.dumps(identity))
        if self._kept is None:
            self._kept = Identity.of(file, offsets=self._port_offsets)

    def _environment(self) -> dict[str, str]:
        cluster = self._cluster
        return {
            **super()._environment(),
            "HOME": str(cluster.directory),
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_NODENAME": cluster.erlang_name(self.number),
            "RABBITMQ_DIST_PORT": str(cluster.distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                f"-name {cluster.erlang_name(self.number)} {cluster.distribution}"
                f" -kernel inet_dist_use_interface {{{cluster.address(self.number).replace('.', ',')}}}"
            ),
        }

    def eval(self, expression: str) -> str:
        address = f"{self._cluster.address(self.number)}:{self._cluster.distribution_port}"
        return erl_call(address, self._cluster.directory, expression)


class Cluster:
    """Three nodes, numbered 1 to 3, which end with this process. Faults last until `heal`, after each test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.password = secrets.token_hex(8)
        self.distribution_port = free_port((0,))
        self._network = f"127.{secrets.randbelow(255) + 1}.{secrets.randbelow(256)}"
        self.distribution = f"-start_epmd false -erl_epmd_port {self.distribution_port}"
        self.directory.mkdir(parents=True, exist_ok=True)
        (directory / ".erlang.cookie").write_text(secrets.token_hex(10))
        (directory / ".erlang.cookie").chmod(0o400)
        self.nodes = {number: ClusterNode(self, number) for number in NODES}
        self._frozen: set[int] = set()
        self._is_lagging = False
        self._had_faults = False

    def address(self, number: int) -> str:
        return f"{self._network}.{number}"

    def erlang_name(self, number: int) -> str:
        return f"r{number}@{self.address(number)}"

    def amqp_url(self, number: int) -> str:
        return self.nodes[number].broker_url

    def stream_url(self, number: int) -> str:
        return self.nodes[number].stream_url

    def __enter__(self) -> Self:
        try:
            for node in self.nodes.values():
                node.launch()
            for node in self.nodes.values():
                node.await_answer()
            # The peer discovery of RabbitMQ 4 finds nodes only through an epmd.
            joining = f"'{self.erlang_name(NODES[0])}', disc"
            for number in NODES[1:]:
                change_stopped(
                    self.nodes[number].eval,
                    f"ok = try rabbit_db_cluster:join({joining})"
                    f" catch error:undef -> rabbit_mnesia:join_cluster({joining}) end",
                )
            self.await_whole()
            for node in self.nodes.values():
                make_streams_survive(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def await_whole(self) -> None:
        names = ", ".join(f"'{self.erlang_name(number)}'" for number in NODES)
        is_whole = "[rpc:call(N, rabbit, is_running, []) andalso length(rpc:call(N, erlang, nodes, [])) == 2"
        # RabbitMQ 4.3 has no partitions to list.
        is_whole += " andalso case rpc:call(N, rabbit_node_monitor, partitions, []) of [_ | _] -> false; _ -> true end"
        is_whole += f" || N <- [{names}]] == [true, true, true]"

        def whole() -> bool:
            try:
                return self.nodes[1].eval(is_whole) == "true"
            except (AssertionError, subprocess.TimeoutExpired):
                return False

        wait_until(whole, SETTLE_S, what="a whole cluster", every_s=0.5)

    def declare(self, stream: str, *, leader: int = 1, **arguments: Any) -> None:
        """Declare a stream whose leader is on a node, and wait for its replicas: none if `x_initial_cluster_size=1`."""
        declare_stream(self.amqp_url(leader), stream, x_queue_leader_locator="client-local", **arguments)
        self._await_places(stream, replicas=int(arguments.get("x_initial_cluster_size", len(NODES))) - 1)

    def places(self, stream: str) -> StreamPlaces | None:
        for number in (each for each in NODES if each not in self._frozen and self.nodes[each].running):
            with (
                suppress(RelatumError),
                StreamReader.open(self.stream_url(number), timeout_s=5.0) as reader,
                closing(reader.link(None)) as link,
            ):
                link.deadline = time.monotonic() + 5.0
                return frames.decode_metadata(link.answer(frames.metadata, [stream]).body)[0]
        return None

    def leader_of(self, stream: str) -> int | None:
        places = self.places(stream)
        if places is None or places.leader is None:
            return None
        ports = {node.stream_port: number for number, node in self.nodes.items()}
        return ports[places.leader.port]

    def move_leader(self, stream: str, number: int) -> None:
        """Make a node the leader of a stream, and wait until it is. All nodes must run.

        RabbitMQ 3.10 elects the first of the other two when the leader is killed: node 3 cannot be asked for there.
        """
        self._had_faults = True
        has_command = server_version(self.amqp_url(number)) >= (4,)
        command = ("--quiet", "--longnames", "restart_stream", stream, "--preferred-leader-node")

        def moved() -> bool:
            leader = self.leader_of(stream)
            if leader is not None and leader != number:
                if has_command:
                    name = self.erlang_name(number)
                    at = self.distribution_port
                    run_tool(self.nodes[number], "rabbitmq-streams", *command, name, node=name, port=at)
                else:
                    assert number != NODES[-1], "RabbitMQ 3.10 cannot make node 3 the leader"
                    self.stop(leader)
                    wait_until(lambda: self.leader_of(stream) not in (None, leader), SETTLE_S, what="a new leader")
                    self.start(leader)
                self._await_places(stream, replicas=len(NODES) - 1)
            return self.leader_of(stream) == number

        wait_until(moved, SETTLE_S, what=f"node {number} as the leader of {stream}")

    def lead_coordinator(self, number: int) -> None:
        """Make a node the leader of the coordinator of all streams. All nodes must run."""
        node, name = self.nodes[number], f"{{rabbit_stream_coordinator, '{self.erlang_name(number)}'}}"

        def leads() -> bool:
            leader = node.eval(f"element(3, ra:members({name}))").replace(" ", "")
            if leader == name.replace(" ", ""):
                return True
            node.eval(f"ra:transfer_leadership({leader}, {name})")
            return False

        wait_until(leads, SETTLE_S, what=f"node {number} as the leader of the coordinator", every_s=0.2)

    def _await_places(self, stream: str, *, replicas: int) -> None:
        def is_there() -> bool:
            places = self.places(stream)
            return places is not None and places.leader is not None and len(places.replicas) == replicas

        wait_until(is_there, SETTLE_S, what=f"a leader and {replicas} replicas of {stream}")

    def stop(self, number: int) -> None:
        self._had_faults = True
        self._frozen.discard(number)
        self.nodes[number].kill()

    def start(self, number: int) -> None:
        self.nodes[number].start()

    def freeze(self, number: int) -> None:
        self._had_faults = True
        self._frozen.add(number)
        self.nodes[number].freeze()

    def thaw(self, number: int) -> None:
        self._frozen.discard(number)
        self.nodes[number].thaw()

    def lag(self, number: int) -> None:
        """Hold back the replicas on a node of the streams there are now: they keep what they have, get nothing new."""
        self._had_faults = self._is_lagging = True
        name = f"'{self.erlang_name(number)}'"
        to_node = f"lists:member({name}, [node(X) || X <- tuple_to_list(sys:get_state(P)), is_pid(X)])]"
        held = self._alive(number).eval(
            f"[begin ok = sys:suspend(P), P end || N <- [node() | nodes()] -- [{name}], P <- {_READERS}{to_node}]"
        )
        assert "<" in held, f"no replica of node {number} is there to be held back"

    def follow(self) -> None:
        self._is_lagging = False
        self._alive().eval(f"[catch sys:resume(P) || N <- [node() | nodes()], P <- {_READERS}true]]")

    def silence(self, stream: str) -> None:
        """Make a stream as after an election until the next confirm: no node shows anything. Skips the test on 4."""
        if server_version(self.amqp_url(1)) >= (4,):
            pytest.skip("RabbitMQ 4 keeps the visible end in other places")
        # The visible end is kept in two places. If they differ, the broker tells a reader that there is more, shows
        # it nothing, and never notifies it again.
        for node in self.nodes.values():
            silenced = node.eval(
                "[begin C = atomics:get(R, 1), atomics:put(R, 1, -1), sys:replace_state(P, fun(S) ->"
                " list_to_tuple([case E of C -> -1; _ -> E end || E <- tuple_to_list(S)]) end), ok end"
                " || {_, P, _, _} <- supervisor:which_children(osiris_server_sup),"
                " #{offset_ref := R, name := N} <- [gen_server:call(P, get_reader_context)],"
                f' string:find(N, "{stream}") =/= nomatch]'
            )
            assert silenced == "[ok]", silenced

    def _alive(self, other_than: int | None = None) -> ClusterNode:
        is_frozen = self._frozen | {other_than}
        return next(node for number, node in self.nodes.items() if node.running and number not in is_frozen)

    def heal(self) -> None:
        """Undo all faults and wait until the cluster is whole."""
        if not self._had_faults:
            return
        for number in list(self._frozen):
            self.thaw(number)
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.await_answer()
        if self._is_lagging:
            self.follow()
        try:
            self.await_whole()
        except AssertionError:
            # Nodes that considered each other lost stay separate until they are restarted.
            for number in NODES[1:]:
                self.nodes[number].kill()
                self.nodes[number].start()
            self.await_whole()
        self._had_faults = False
