// The backend's sources as one unit for nvcc: kernels are compiled once for each architecture.
#include "backend.cpp"
#include "cache.cpp"
#include "forward.cpp"
#include "plan.cpp"
#include "weights.cpp"
