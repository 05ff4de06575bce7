"""Pipeline parallelism: schedules as data, their checks and simulation, and what runs them. Names: `zeroengine.pipe`.

`actions`, `schedules`, `lowering`, `checks`, `simulate` and `draw` need neither torch nor a job.
"""
