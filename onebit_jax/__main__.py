"""The command ``python -m onebit_jax``."""

from onebit_jax.plan import main

if __name__ == "__main__":
    main()
