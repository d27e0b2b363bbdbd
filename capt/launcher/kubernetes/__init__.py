"""Jobs on Kubernetes: the settings of a cluster, the manifests of a job or a sweep, and how a cluster is given them."""
