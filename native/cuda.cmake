# The device plug-ins: libtinyloop_cuda.so (nvcc), and the same sources as libtinyloop_emulated.so (the C++ compiler), which
# runs the kernels on the CPU for tests. The engine links neither: it opens one when a model asks for that device.

set(TINYLOOP_CUDA AUTO CACHE STRING "The CUDA plug-in. AUTO: for the GPU of this machine, if it has one and nvcc; ON: for \
every architecture; OFF: none")
set_property(CACHE TINYLOOP_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TINYLOOP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TINYLOOP_CUDA is '${TINYLOOP_CUDA}': use AUTO, ON or OFF")
endif()
set(host_sources src/cuda/backend.cpp src/cuda/plan.cpp src/cuda/cache.cpp src/cuda/weights.cpp)
set(emulator_sources src/cuda/emulator/fibers.cpp src/cuda/emulator/emulator.cpp src/cuda/emulator/device.cpp
                     src/cpu/half.cpp)
set(cuda_includes ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda ${CMAKE_CURRENT_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR}/include)

set(export_entry -Wl,--exclude-libs,ALL -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/exports.map)

# 1. The CUDA plug-in. A machine without a GPU has no use for it, and it takes a minute to compile.
set(with_cuda OFF)
if(TINYLOOP_CUDA STREQUAL "ON" OR (TINYLOOP_CUDA STREQUAL "AUTO" AND NOT TINYLOOP_SANITIZE AND
                                    EXISTS /proc/driver/nvidia/version))
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    if(TINYLOOP_CUDA STREQUAL "ON")
      set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)  # 90 with PTX, for what comes after
    else()
      set(CMAKE_CUDA_ARCHITECTURES native)
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(with_cuda ON)
  elseif(TINYLOOP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TINYLOOP_CUDA=ON, but there is no nvcc (CUDACXX=/path/to/nvcc names one)")
  endif()
endif()
message(STATUS "CUDA plug-in: ${with_cuda} (TINYLOOP_CUDA=${TINYLOOP_CUDA}) ${CMAKE_CUDA_ARCHITECTURES}")
if(with_cuda)
  # No part of CUDA is linked but its static runtime, so that the plug-in loads, and says why it cannot work, on a machine
  # without a driver.
  add_library(tinyloop_cuda MODULE src/cuda/plugin.cu src/cuda/device.cu src/cpu/half.cpp)
  target_include_directories(tinyloop_cuda PRIVATE ${cuda_includes})
  target_compile_definitions(tinyloop_cuda PRIVATE TINYLOOP_DEVICE_NAME="cuda")
  set_target_properties(tinyloop_cuda PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden CUDA_SEPARABLE_COMPILATION OFF)
  target_compile_options(tinyloop_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-fmad=false -Werror all-warnings \
-Xptxas -warn-spills,-warn-lmem-usage,-warn-double-usage -Xcompiler -Wall,-Wextra --threads 2>")
  target_link_options(tinyloop_cuda PRIVATE ${export_entry})
  if(SKBUILD)
    install(TARGETS tinyloop_cuda LIBRARY DESTINATION tinyloop_serve/native)
  endif()
endif()

# 2. The emulated one and its tests. Fibers are switched by x86-64 instructions, and TSan knows nothing of them.
if(SKBUILD OR TINYLOOP_SANITIZE STREQUAL "thread" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  return()
endif()
enable_testing()
include(CheckCXXSourceRuns)
set(CMAKE_REQUIRED_FLAGS -mfma)
check_cxx_source_runs("int main() { return !__builtin_cpu_supports(\"fma\"); }" TINYLOOP_HOST_HAS_FMA)
unset(CMAKE_REQUIRED_FLAGS)
function(add_kernels name) # sources
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PRIVATE ${cuda_includes} ${CMAKE_CURRENT_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE TINYLOOP_DEVICE_NAME="emulated")
  target_compile_options(${name} PRIVATE -Wno-unknown-pragmas) # "unroll"
  if(TINYLOOP_HOST_HAS_FMA)
    target_compile_options(${name} PRIVATE -mfma) # else each multiply-add is a call; the same bits
  endif()
endfunction()
add_kernels(emulator ${emulator_sources})
add_kernels(emulated_host ${host_sources})
# As an engine opens it, with small blocks: several times as fast on tiny models. backend_test takes the real ones.
add_kernels(small_kernels src/cuda/forward.cpp)
target_compile_definitions(small_kernels PRIVATE TINYLOOP_BLOCK_THREADS=64)
add_library(tinyloop_emulated MODULE)
target_link_libraries(tinyloop_emulated PRIVATE emulator emulated_host small_kernels)
target_link_options(tinyloop_emulated PRIVATE ${export_entry})
add_executable(emulator_test tests/cuda/emulator_test.cpp)
target_include_directories(emulator_test PRIVATE ${cuda_includes} tests)
target_link_libraries(emulator_test PRIVATE emulator)
add_executable(backend_test tests/cuda/backend_test.cpp)
target_include_directories(backend_test PRIVATE src ${CMAKE_CURRENT_SOURCE_DIR}/tests)
target_link_libraries(backend_test PRIVATE engine)
add_test(NAME emulator_test COMMAND emulator_test)
add_test(NAME backend_small_test COMMAND backend_test $<TARGET_FILE:tinyloop_emulated> short)

# With blocks of the real size, and again with the race detector: that takes the place of the sanitizer's library, so
# kernels are compiled for it and linked without it. The sanitizers have enough to do with the small blocks.
if(NOT TINYLOOP_SANITIZE)
  add_kernels(real_kernels src/cuda/forward.cpp)
  add_library(tinyloop_real MODULE)
  set_target_properties(tinyloop_real PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/kernels)
  target_link_libraries(tinyloop_real PRIVATE emulator emulated_host real_kernels)
  add_test(NAME backend_test COMMAND backend_test $<TARGET_FILE:tinyloop_real>)
  add_kernels(emulator_races ${emulator_sources} src/cuda/emulator/races.cpp)
  target_compile_definitions(emulator_races PRIVATE TINYLOOP_EMULATOR_RACES)
  add_kernels(watched_kernels src/cuda/forward.cpp)
  target_compile_options(watched_kernels PRIVATE -fsanitize=thread)
  add_library(tinyloop_races MODULE)
  set_target_properties(tinyloop_races PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/kernels)
  target_link_libraries(tinyloop_races PRIVATE emulator_races emulated_host watched_kernels)
  add_kernels(watched_test tests/cuda/emulator_test.cpp)
  target_compile_definitions(watched_test PRIVATE TINYLOOP_EMULATOR_RACES)
  target_compile_options(watched_test PRIVATE -fsanitize=thread)
  add_executable(emulator_races_test)
  target_link_libraries(emulator_races_test PRIVATE emulator_races watched_test)
  add_test(NAME emulator_races_test COMMAND emulator_races_test)
  add_test(NAME backend_races_test COMMAND backend_test $<TARGET_FILE:tinyloop_races> short)
endif()
