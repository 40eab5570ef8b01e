"""A compressed exchange against dense ones, on hosts of a chosen bandwidth made on one machine."""
