"""The parts of ``benchmarks/credit.py``.

- :mod:`credit_study.gradients`: every estimator's gradient on identical data, against the true one.
- :mod:`credit_study.continuations`: what continuations of the states of drawn batches return.
- :mod:`credit_study.curves`: learning curves of the three algorithms.
- :mod:`credit_study.registered`: what the study of worlds and estimators compares, said before it
  runs.
- :mod:`credit_study.runs`: one run, tuning, and all runs on all cores.
- :mod:`credit_study.statistics`: interquartile means, bootstrap intervals, probabilities of
  improvement.
- :mod:`credit_study.page`: tables and plots.
"""
