"""The simple scheduler: a CPU pool that mirrors the GPU's pool, without secondary tiers."""
