# Every library this build links, found once for all directories. Each is a Debian package (tools/install_deps.sh).
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(hwy REQUIRED CONFIG)
find_package(fmt REQUIRED CONFIG)
if(TFLA_BUILD_CLI)
  find_package(CLI11 REQUIRED CONFIG)
  find_package(OpenBLAS MODULE)  # what tfla bench --gemm compares with; the program does without
endif()
if(TFLA_BUILD_CLI OR TFLA_BUILD_TESTS)
  find_package(nlohmann_json REQUIRED CONFIG)
endif()
if(TFLA_BUILD_TESTS AND NOT TFLA_SANITIZE STREQUAL "fuzzer")
  find_package(GTest REQUIRED)
endif()
