"""Programs that use onebit_jax as any user would."""
