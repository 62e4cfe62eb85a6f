"""The shop with one line more. In a user's program it stands where the broker is made."""

import asyncio
import os

import relatum
from relatum.keys import preset
from tests.acceptance._faststream_shop import broker, main

relatum.intercept(broker, database=os.environ["SHOP_DATABASE"], keys=preset("faststream"))

if __name__ == "__main__":
    asyncio.run(main())
