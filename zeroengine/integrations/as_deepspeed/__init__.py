"""A folder for PYTHONPATH, in which Python finds a package and a distribution `deepspeed` that are zeroengine.

`zerorun --as-deepspeed` puts it in front of the path of the ranks, so that programs which start others (accelerate launch)
hand it on.
"""
