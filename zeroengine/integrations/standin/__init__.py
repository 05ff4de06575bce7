"""What stands for the package `deepspeed`; `zeroengine.integrations.deepspeed` installs it."""
