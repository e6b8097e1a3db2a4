# A real Kubernetes on this machine, for tests and demonstrations; included by the Makefile.

CLUSTER_PYTHON ?= python
# Folders or files to take `cluster` tests from: nobody else has any.
CLUSTER_TESTS ?= tests/cluster tests/operator
# Most of a test is waiting: one process for each group of side_by_side.py.
SIDE_BY_SIDE ?= -n 3 --dist loadscope
# An existing cluster is given no images.
IMAGES := $(if $(RADIXGROVE_TEST_KUBECONFIG),,cluster-images)
CLUSTER := $(CLUSTER_PYTHON) -m tests.cluster.harness

.PHONY: cluster-build cluster-prepare cluster-images cluster-up cluster-down test-cluster test-cluster-rights test-cluster-both test-cluster-slow demo-cluster

cluster-build: ## build the programs of Kubernetes into the user's cache (cold: about 13 minutes)
	$(CLUSTER) build

cluster-prepare: ## install the Debian packages that nodes need (as root), compile bytecode
	$(CLUSTER) prepare

cluster-images: cluster-prepare ## build the images that tests install into the user's cache
	$(CLUSTER) images

cluster-up: cluster-prepare ## start a two-node cluster that goes on until cluster-down
	$(CLUSTER) up

cluster-down: ## end clusters, and remove whatever killed ones have left
	$(CLUSTER) down

test-cluster: cluster-build cluster-prepare $(IMAGES) ## run the tests that need a real Kubernetes (all but the slow ones)
	$(CLUSTER_PYTHON) -m pytest -m "cluster and not slow" $(SIDE_BY_SIDE) $(CLUSTER_TESTS)

test-cluster-rights: cluster-build cluster-prepare $(IMAGES) ## take every right from the operator in turn; uninstall the chart
	$(CLUSTER_PYTHON) -m pytest -m "cluster and slow" $(SIDE_BY_SIDE) tests/operator/kube/test_rbac.py tests/cluster/test_upgrade.py

test-cluster-both: cluster-build cluster-prepare $(IMAGES) ## those two in one go
	$(CLUSTER_PYTHON) -m pytest -m cluster $(SIDE_BY_SIDE) $(CLUSTER_TESTS) \
	  --ignore tests/cluster/test_demo.py --ignore tests/cluster/test_worker_image.py

test-cluster-slow: cluster-build cluster-prepare ## all of the slow ones: those, the demonstration, the worker's image, which has CUDA
	$(CLUSTER_PYTHON) -m pytest -m "cluster and slow" -o timeout=1800

# Checked with any Python before the environment is made, which is gigabytes.
CHECK_PYTHON := $(or $(wildcard $(CLUSTER_PYTHON)),python3)

demo-cluster: ## a cluster, the chart, the demo model and one question; sets itself up; until Ctrl-C
	@$(CHECK_PYTHON) -m tests.cluster.harness.demo_check
	@$(if $(filter $(BIN)/python,$(CLUSTER_PYTHON)),VENV=$(VENV) .ci/setup dev)
	@$(CLUSTER) prepare
	@exec $(CLUSTER) demo
