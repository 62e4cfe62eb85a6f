"""The live view: messages as they are recorded, followed once for all who look."""
