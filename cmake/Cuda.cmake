# The CUDA backend: code for every GPU generation from Ampere on, PTX for newer ones. The runtime is linked statically, so
# that the library also loads where there is no GPU.
#
# EMULATED builds it for tests without a GPU: src/emulator runs the kernels on the CPU.
include(DecideCuda)
if(NOT TFLA_CUDA STREQUAL "EMULATED")
  tfla_decide_cuda("${TFLA_CUDA}" TFLA_CUDA nvcc sentence)  # from here on AUTO is settled
endif()
if(sentence)
  message(NOTICE "${sentence}")
endif()
if(TFLA_CUDA STREQUAL "EMULATED")
  find_package(Boost REQUIRED COMPONENTS context)
  find_package(Threads REQUIRED)
elseif(TFLA_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${nvcc}")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # CMake 3.25 does not know how newer compilers are told of C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  string(APPEND CMAKE_CUDA_FLAGS " --diag-suppress 554")  # a conversion that only output views need
  # Another compiler spills elsewhere, which is no reason for a build to fail where nobody works on the kernels.
  set(TFLA_CHECK_SPILLS OFF)
  if(TFLA_WERROR AND CMAKE_CUDA_COMPILER_VERSION MATCHES "^13\\.0\\.")  # the compiler that src/cuda/spills.txt is for
    set(TFLA_CHECK_SPILLS ON)
  endif()
endif()
