"""What watches a training run: monitors, times, profiles, and the report. Everything here is an `Observer` of the engine, or reads
what one wrote; nothing is imported or hooked unless the configuration asks for it."""
