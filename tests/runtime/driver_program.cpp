// Exercises driver.h beside cuda.h: the layouts agree, and launches ask the driver for what they should. Linked as
// three files: the program, a libcuda.so.1 that records (-DDRIVER) and a libtorch_cuda.so that has a stream (-DTORCH).
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <cuda.h>

struct Record {
    CUlaunchConfig config;
    CUlaunchAttribute attributes[2];
    void* function;
    long long first, second;  // arguments
    CUcontext current;        // when it was launched
    int launches, pushes, pops, error;
};

#ifdef DRIVER
extern "C" {
Record record = {};
CUcontext current = nullptr;

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** arguments, void** extra) {
    record.config = *config;
    std::memcpy(record.attributes, config->attrs, config->numAttrs * sizeof(CUlaunchAttribute));
    record.function = f, record.current = current, ++record.launches;
    record.first = *static_cast<long long*>(arguments[0]), record.second = *static_cast<long long*>(arguments[1]);
    return extra ? CUDA_ERROR_INVALID_VALUE : static_cast<CUresult>(record.error);
}
CUresult cuCtxGetCurrent(CUcontext* c) { return *c = current, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext c) { return current = c, ++record.pushes, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* c) { return *c = current, current = nullptr, ++record.pops, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "CUDA_ERROR_OF_TEST", CUDA_SUCCESS; }
}
#elif defined(TORCH)
extern "C" std::int32_t aoti_torch_get_current_cuda_stream(std::int32_t device, void** stream) {
    return *stream = reinterpret_cast<void*>(static_cast<std::intptr_t>(0x100 + device)), 0;
}
#else
#include <cstdlib>

#include "driver.h"

static_assert(sizeof(LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(LaunchConfig, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(LaunchConfig, smem_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));

#define EXPECT(truth) ((truth) ? void() : (std::printf("line %d: %s\n", __LINE__, #truth), std::exit(1)))

int main(int, char** arguments) {
    EXPECT(dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL));  // as PyTorch is there before the launcher
    const Driver* driver = Driver::get();
    EXPECT(driver);
    Record& record = *static_cast<Record*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "record"));
    Launch launch;
    launch.function = reinterpret_cast<void*>(1), launch.unaligned = reinterpret_cast<void*>(2);
    launch.context = reinterpret_cast<void*>(3);
    launch.grid[0] = 8, launch.grid[1] = 5, launch.grid[2] = 7;
    launch.block[0] = 24, launch.block[1] = 4;
    launch.smem_bytes = 4096, launch.cluster = 4, launch.programmatic = true, launch.misaligned = 15;
    long long first = 11, second = -12;
    void* pointers[] = {&first, &second};

    EXPECT(driver->launch(launch, 1, 64, pointers) == 0);
    const CUlaunchConfig& c = record.config;
    EXPECT(c.gridDimX == 8 && c.gridDimY == 5 && c.gridDimZ == 7);
    EXPECT(c.blockDimX == 24 && c.blockDimY == 4 && c.blockDimZ == 1 && c.sharedMemBytes == 4096);
    EXPECT(c.hStream == reinterpret_cast<CUstream>(0x101));
    EXPECT(c.numAttrs == 2 && record.attributes[0].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
    const auto& cluster = record.attributes[0].value.clusterDim;
    EXPECT(cluster.x == 4 && cluster.y == 1 && cluster.z == 1);
    EXPECT(record.attributes[1].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
    EXPECT(record.attributes[1].value.programmaticStreamSerializationAllowed == 1);
    EXPECT(record.function == launch.function && record.first == 11 && record.second == -12);
    EXPECT(record.current == launch.context && record.pushes == 1 && record.pops == 1);

    EXPECT(driver->launch(launch, 0, 8, pointers) == 0);  // an address that the vectors do not fit
    EXPECT(record.function == launch.unaligned && c.numAttrs == 0 && c.sharedMemBytes == 0 && c.gridDimX == 8);

    *static_cast<void**>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "current")) = launch.context;
    launch.cluster = 1, launch.programmatic = false;
    EXPECT(driver->launch(launch, 0, 0, pointers) == 0);
    EXPECT(record.pushes == 2 && record.pops == 2 && c.numAttrs == 0 && record.launches == 3);

    record.error = CUDA_ERROR_INVALID_VALUE;
    EXPECT(driver->launch(launch, 0, 0, pointers) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(driver->name_of(1) == "CUDA_ERROR_OF_TEST (1)");
    EXPECT(Driver::is_of_capture(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) && !Driver::is_of_capture(CUDA_ERROR_INVALID_VALUE));
}
#endif
