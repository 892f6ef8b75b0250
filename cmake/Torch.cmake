# tfla_find_torch(): the installed PyTorch as the target tfla_torch_abi. Only its stable ABI is used. libtorch.so is named
# as needed so that the loader looks there (the process has loaded it by then), not to find it in that place again.
function(tfla_find_torch)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
      "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parent)"
    OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT EXISTS "${torch}/include/torch/csrc/stable/library.h")
    message(FATAL_ERROR "tfla: ${Python3_EXECUTABLE} has no torch 2.10 or newer; install it or set Python3_EXECUTABLE.")
  endif()
  add_library(tfla_torch_abi INTERFACE)
  target_include_directories(tfla_torch_abi SYSTEM INTERFACE "${torch}/include")
  target_compile_definitions(tfla_torch_abi INTERFACE TORCH_TARGET_VERSION=0x020a000000000000ULL)
  # By itself, not with all that it needs: a build of torch with CUDA may lie where there is no driver.
  target_link_options(tfla_torch_abi INTERFACE LINKER:--no-as-needed "${torch}/lib/libtorch.so" LINKER:--as-needed
                      LINKER:--allow-shlib-undefined)
endfunction()
