# Applies TFLA_SANITIZE to every target that follows, and fills TFLA_TEST_ENVIRONMENT with what the instrumented
# programs need at run time.
set(TFLA_TEST_ENVIRONMENT "")

if(TFLA_SANITIZE STREQUAL "address")
  set(flags -fsanitize=address,undefined -fno-sanitize-recover=all)
  list(APPEND TFLA_TEST_ENVIRONMENT "ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1"
       "UBSAN_OPTIONS=print_stacktrace=1"
       "LSAN_OPTIONS=suppressions=${CMAKE_CURRENT_LIST_DIR}/leaks.txt:print_suppressions=0")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND flags -Wno-maybe-uninitialized)  # instrumented, even libstdc++'s own headers set it off
  endif()
elseif(TFLA_SANITIZE STREQUAL "fuzzer")
  # fuzzer-no-link: every target counts coverage, only the fuzz targets have libFuzzer's main.
  set(flags -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
elseif(TFLA_SANITIZE STREQUAL "thread")
  set(flags -fsanitize=thread)
elseif(NOT TFLA_SANITIZE STREQUAL "none")
  message(FATAL_ERROR "tfla: TFLA_SANITIZE is \"${TFLA_SANITIZE}\"; it must be none, address, thread or fuzzer.")
endif()

if(TFLA_SANITIZE MATCHES "thread|fuzzer" AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # gcc has no libFuzzer, and its libgomp synchronises by futexes that ThreadSanitizer takes for races.
  message(FATAL_ERROR "tfla: TFLA_SANITIZE=${TFLA_SANITIZE} needs clang, CMAKE_CXX_COMPILER is ${CMAKE_CXX_COMPILER}.")
endif()

if(TFLA_SANITIZE STREQUAL "thread")
  # Archer tells ThreadSanitizer what OpenMP's barriers order. Without it every parallel region is a false race; and
  # libomp itself is not instrumented, so what happens inside it is not to be reported.
  get_filename_component(openmp_dir "${OpenMP_omp_LIBRARY}" DIRECTORY)
  find_library(TFLA_ARCHER archer HINTS "${openmp_dir}")
  mark_as_advanced(TFLA_ARCHER)
  if(NOT TFLA_ARCHER)
    message(FATAL_ERROR "tfla: TFLA_SANITIZE=thread needs libarcher.so beside ${OpenMP_omp_LIBRARY}; "
                        "install the Debian package libomp-dev.")
  endif()
  list(APPEND TFLA_TEST_ENVIRONMENT "TSAN_OPTIONS=ignore_noninstrumented_modules=1"
       "OMP_TOOL_LIBRARIES=${TFLA_ARCHER}")
endif()

if(NOT TFLA_SANITIZE STREQUAL "none")
  add_compile_options(${flags} -fno-omit-frame-pointer)
  add_link_options(${flags})
endif()
