"""Ray actors: thin shells around ranks, the driver, placement and supervision."""
