"""What needs a GPU, on one: checks, speed, and what to look at first. Run as
``python -m benchmarks.gpu`` from the checkout.

- :mod:`benchmarks.gpu.__main__`: the command line.
- :mod:`benchmarks.gpu.report`: runs parts one after the other, and writes the JSON.
- :mod:`benchmarks.gpu.place`: device, sizes, models of random weights, the game, and runs of it.
- :mod:`benchmarks.gpu.checks`: what must hold.
- :mod:`benchmarks.gpu.attention`: which attention kernels run, what a new shape costs, gradients
  that are not finite.
- :mod:`benchmarks.gpu.speed`: sampling and updates; tokens, arithmetic and memory.
- :mod:`benchmarks.gpu.first_look`: the calls for the first hour with a GPU.
"""
