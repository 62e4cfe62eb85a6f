"""Messages for places: of a DataFrame's rows, and of the relata of a micro-batch."""
