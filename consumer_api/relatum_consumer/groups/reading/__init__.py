"""Reading groups whole and in order, and looking at one by its id."""
