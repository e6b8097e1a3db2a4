# A real Kubernetes on this machine, for tests and demonstrations; included by the Makefile.

CLUSTER_PYTHON ?= python
CLUSTER := $(CLUSTER_PYTHON) -m tests.cluster.harness

.PHONY: cluster-build test-cluster

cluster-build: ## build the programs of Kubernetes into the user's cache (cold: about 13 minutes)
	$(CLUSTER) build

test-cluster: cluster-build ## run the tests that need a real Kubernetes
	$(CLUSTER_PYTHON) -m pytest -m cluster
