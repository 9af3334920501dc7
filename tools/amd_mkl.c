/* Makes MKL choose the matrix kernels that it has for AMD's CPUs, on any CPU: preloaded by tools/kernels.py. */
int mkl_serv_intel_cpu(void) { return 0; }
int mkl_serv_intel_cpu_true(void) { return 0; }
#ifdef ZEN
int mkl_serv_cpuiszen(void) { return 1; }
#endif
