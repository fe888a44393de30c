"""Whole clients kept private: where to precondition, with the clients or at the server.

The comparison of Section 6.2 of AdaDPS (Li et al., ICML 2022, Figure 6 and Algorithm 3), on verses
of the Bible, each client with neighbouring ones, instead of posts on Stack Overflow::

    python -m benchmarks.studies.private_federated
    python -m benchmarks.studies.private_federated --quick

``methods`` says what is compared.
"""
