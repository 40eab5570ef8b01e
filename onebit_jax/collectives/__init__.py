"""What travels: signs and their packing, a pytree's layout in one buffer, and the exchanges."""
