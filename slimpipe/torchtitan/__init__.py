"""SlimPipe inside torchtitan: TOML files, `Trainer.Config`, pipelining function, metrics, CPU device.

The only package of the project that imports torchtitan. `torchrun -m torchtitan.train --module slimpipe.torchtitan
--config llama3_debug` finds its configurations in `config_registry`.
"""
