# Whether the CUDA backend is built, decided in one place for CMake, pip and make.
#
# tfla_decide_cuda(WANTED ENABLED COMPILER SENTENCE): WANTED is ON, OFF or AUTO, which is ON where there is an nvcc that
# can build it. Sets ENABLED to ON or OFF, COMPILER to that nvcc, and for AUTO SENTENCE to what was chosen and why.
#
# As a program: cmake [-DTFLA_CUDA=AUTO] -P cmake/DecideCuda.cmake prints ON or OFF, and the sentence to stderr.
set(TFLA_OLDEST_NVCC 12.4)

# The version that an nvcc says it has; empty for what is no nvcc.
function(tfla_nvcc_version compiler version)
  execute_process(COMMAND "${compiler}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" found "${text}")
  set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# Where to look: one that is named, or the first in PATH and those of the places where NVIDIA's installers put it, in
# that order. A distribution's own nvcc, which is first in PATH, may be too old where a newer one lies beside it.
function(tfla_nvcc_candidates candidates)
  if(CMAKE_CUDA_COMPILER)
    set(${candidates} "${CMAKE_CUDA_COMPILER}" PARENT_SCOPE)
    return()
  elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
    set(${candidates} "$ENV{CUDACXX}" PARENT_SCOPE)
    return()
  endif()
  if(NOT DEFINED TFLA_CUDA_ROOTS)
    set(TFLA_CUDA_ROOTS "$ENV{CUDA_PATH}" "$ENV{CUDA_HOME}" /usr/local/cuda)
  endif()
  find_program(in_path NAMES nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  set(found "")
  foreach(path "${in_path}" ${TFLA_CUDA_ROOTS})
    if(IS_DIRECTORY "${path}")
      string(APPEND path "/bin/nvcc")
    endif()
    if(path AND EXISTS "${path}")
      list(APPEND found "${path}")
    endif()
  endforeach()
  set(${candidates} "${found}" PARENT_SCOPE)
endfunction()

function(tfla_decide_cuda wanted enabled compiler sentence)
  set(${enabled} OFF PARENT_SCOPE)
  set(${compiler} "" PARENT_SCOPE)
  set(${sentence} "" PARENT_SCOPE)
  string(TOUPPER "${wanted}" wanted)
  if(NOT wanted STREQUAL "AUTO" AND NOT wanted)
    return()
  endif()

  tfla_nvcc_candidates(candidates)
  set(why "there is no nvcc in PATH, CUDA_PATH, CUDA_HOME or /usr/local/cuda")
  foreach(candidate IN LISTS candidates)
    tfla_nvcc_version("${candidate}" version)
    if(version VERSION_GREATER_EQUAL TFLA_OLDEST_NVCC)
      set(${enabled} ON PARENT_SCOPE)
      set(${compiler} "${candidate}" PARENT_SCOPE)
      if(wanted STREQUAL "AUTO")
        set(${sentence} "tfla: building the CUDA backend too, with nvcc ${version} (${candidate}), which takes many \
minutes on few cores; without it: TFLA_CUDA=OFF make run, pip install . -Ccmake.define.TFLA_CUDA=OFF" PARENT_SCOPE)
      endif()
      return()
    endif()
    set(why "${candidate} is not nvcc ${TFLA_OLDEST_NVCC} or newer")
    if(version)
      string(APPEND why ", but ${version}")
    endif()
  endforeach()
  if(wanted STREQUAL "AUTO")
    set(${sentence} "tfla: building the CPU backend alone, since ${why}; for NVIDIA GPUs install the CUDA toolkit \
${TFLA_OLDEST_NVCC} or newer and build again (TFLA_CUDA=OFF says that none is wanted)" PARENT_SCOPE)
  else()
    message(FATAL_ERROR "tfla: TFLA_CUDA is ON and ${why}; install the CUDA toolkit ${TFLA_OLDEST_NVCC} or newer, or "
                        "build with TFLA_CUDA=OFF.")
  endif()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  if("${TFLA_CUDA}" STREQUAL "")
    set(TFLA_CUDA AUTO)
  endif()
  tfla_decide_cuda("${TFLA_CUDA}" enabled compiler sentence)
  if(sentence)
    message(NOTICE "${sentence}")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${enabled}")
endif()
