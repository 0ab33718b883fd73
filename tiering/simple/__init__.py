"""The simple scheduler: a CPU pool that mirrors the GPU's, without secondary tiers."""
