"""One protocol of steps: what decides is pure, and yields what it needs; one blocking and one asyncio driver do it.

Steps are a generator. What it yields is

- a `Request`: it is performed, and the steps go on with its answer, or with the error it met;
- anything else: it is given to the caller, and the steps go on when the caller asks for more (`each`, `async_each`).

So a request reads like a call, with the type of its answer: `rows = yield from Select(sql, parameters)`. Steps are part
of others by `yield from`, too. One rule holds for all that goes wrong:

- What a request meets, any `Exception`, is raised in the steps where they asked for it, as it would be by a call.
- What ends the driver itself (a task that is cancelled, Ctrl-C, a caller who wants no more) closes the steps there:
  their `finally` runs, and they have no say. To ask for more then is a defect (`RuntimeError`).
- However they end, the steps are closed before the driver returns or raises, and so before whatever performs them:
  that is opened around the driver, `with connection: run(steps, connection.perform)`.
- Time is the performer's: it waits no longer than the deadline of the call (`relatum.waiting`), and the error of that
  is raised in the steps like any other. Such a limit is set around `run`, never around `each`: it would hold for what
  the caller does between two things it is given.

Steps inside steps, where their requests are to be performed in another way, are carried by a request: who performs that
runs a driver of its own.

Steps belong to one driver, in one thread or task. What should be done at the same time is one request for all of it:
who performs it knows best how. See docs/adr/0016.
"""

from relatum.steps._asyncio import async_each, async_run
from relatum.steps._blocking import each, run
from relatum.steps._request import Request, Steps

__all__ = ["Request", "Steps", "async_each", "async_run", "each", "run"]
