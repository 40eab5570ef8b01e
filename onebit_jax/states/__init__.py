"""How parameters and optimizer states lie on a mesh: placing, splitting, resizing, converting."""
