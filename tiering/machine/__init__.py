"""One cache per machine: a service hosts the secondary tiers of all engines of a machine.

:class:`~tiering.machine.tier.MachineTier` is one tier of the service, as an engine's manager uses it, and
:class:`~tiering.machine.service.MachineService` is the process that owns the tiers. The package imports what tiers are
made of, and nothing imports it but the stack file and the command line.
"""
