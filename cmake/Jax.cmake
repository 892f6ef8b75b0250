# tfla_find_jax(): XLA's FFI headers, which come with jaxlib, as the target tfla_jax_headers; no target where there is no
# jaxlib. The headers are all that is used of it.
function(tfla_find_jax)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
      "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('jaxlib').origin).parent)"
    OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT EXISTS "${jaxlib}/include/xla/ffi/api/ffi.h")
    message(STATUS "tfla: ${Python3_EXECUTABLE} has no jaxlib; the binding for JAX is left out.")
    return()
  endif()
  add_library(tfla_jax_headers INTERFACE)
  target_include_directories(tfla_jax_headers SYSTEM INTERFACE "${jaxlib}/include")
  # Its C header names the fields of a struct like their types, which GCC takes for an error by default.
  target_compile_options(tfla_jax_headers INTERFACE $<$<CXX_COMPILER_ID:GNU>:-fpermissive>)
endfunction()
