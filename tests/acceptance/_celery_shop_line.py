"""The shop with one line more. In a user's program it stands where the app is made."""

import os

import relatum
from relatum.keys import preset
from tests.acceptance._celery_shop import app, main

relatum.intercept(app, database=os.environ["SHOP_DATABASE"], keys=preset("celery"), copy_to="celery.tasks")

if __name__ == "__main__":
    main()
