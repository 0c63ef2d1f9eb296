// What a PyTorch without accelerators lacks for one: hooks, a guard, and a page-locking allocator.
//
// The current device and the current streams are numbers of each thread. What streams and events do
// is played in Python (simulator.py), which `sim_connect` hands over as functions. The library must
// be loaded with RTLD_GLOBAL before PyTorch, so that its `getAccelerator` is the one that is found.

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <vector>

namespace {
using namespace c10;

constexpr int kMost = 8;
constexpr size_t kPage = 4096;
DeviceType kind = DeviceType::CPU;
int devices = 0;
thread_local DeviceIndex current = 0;
thread_local StreamId streams[kMost] = {};
thread_local int capture_mode = 0;

// Answers of Python: negative where it refuses, and the reason is in `sim_refused`.
struct Driver {
  int64_t (*record)(int64_t event, int device, int64_t stream);
  int (*block)(int64_t event, int device, int64_t stream);
  int (*query_event)(int64_t event);
  int (*synchronize_event)(int64_t event);
  double (*elapsed)(int64_t first, int64_t last);
  int64_t (*new_stream)(int device);
  int (*query_stream)(int device, int64_t stream);
  int (*synchronize_stream)(int device, int64_t stream);
  int (*synchronize_device)(int device);
  int (*capturing)(int device, int64_t stream);
} driver{};

std::mutex mutex;
std::vector<int64_t> dead;                  // events that nobody has any more
std::map<uintptr_t, size_t> locked;         // page-locked memory: where it starts, its size
thread_local char refused[512] = "";

template <typename T>
T answered(T answer) {
  TORCH_CHECK(answer >= 0, refused);
  return answer;
}

int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kind; }
  Device exchangeDevice(Device d) const override {
    Device old(kind, current);
    uncheckedSetDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kind, current); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < devices, "invalid device ordinal");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  DeviceIndex index(Device d) const { return d.index() < 0 ? current : d.index(); }
  Stream of(Device d, StreamId id) const {
    return Stream(Stream::UNSAFE, Device(kind, index(d)), id);
  }
  Stream getStream(Device d) const override { return of(d, streams[index(d)]); }
  Stream getDefaultStream(Device d) const override { return of(d, 0); }
  Stream getNewStream(Device d, int) const override {
    return of(d, answered(driver.new_stream(index(d))));
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    streams[index(s.device())] = s.id();
    return old;
  }
  void record(void** event, const Stream& s, DeviceIndex, EventFlag) const override {
    auto made = answered(driver.record(number(*event), s.device_index(), s.id()));
    *event = reinterpret_cast<void*>(made);
  }
  void block(void* event, const Stream& s) const override {
    if (event) answered(driver.block(number(event), s.device_index(), s.id()));
  }
  bool queryEvent(void* event) const override {
    return !event || answered(driver.query_event(number(event)));
  }
  void synchronizeEvent(void* event) const override {
    if (event) answered(driver.synchronize_event(number(event)));
  }
  double elapsedTime(void* first, void* last, DeviceIndex) const override {
    return answered(driver.elapsed(number(first), number(last)));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    // Not handed to Python here: the interpreter may be gone.
    if (event) {
      std::lock_guard<std::mutex> lock(mutex);
      dead.push_back(number(event));
    }
  }
  bool queryStream(const Stream& s) const override {
    return answered(driver.query_stream(s.device_index(), s.id()));
  }
  void synchronizeStream(const Stream& s) const override {
    answered(driver.synchronize_stream(s.device_index(), s.id()));
  }
  void synchronizeDevice(DeviceIndex i) const override {
    answered(driver.synchronize_device(i < 0 ? current : i));
  }
  bool isStreamCapturing(const Stream& s) const override {
    return driver.capturing && answered(driver.capturing(s.device_index(), s.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
};

bool is_locked(const void* data, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  auto at = reinterpret_cast<uintptr_t>(data);
  auto next = locked.upper_bound(at);
  if (next == locked.begin()) return false;
  --next;
  return at + size <= next->first + next->second;
}

void give_back(void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  locked.erase(reinterpret_cast<uintptr_t>(data));
  std::free(data);
}

struct PageLocked final : Allocator {
  DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size) {
      data = std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
      TORCH_CHECK(data, "out of host memory");
      std::lock_guard<std::mutex> lock(mutex);
      locked[reinterpret_cast<uintptr_t>(data)] = size;
    }
    return {data, data, &give_back, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} page_locked;

// A seed, and how many numbers kernels have been promised: 16 bytes, as on CUDA. The host advances
// it when it enqueues a kernel; what is drawn is drawn in Python.
struct Generator final : GeneratorImpl {
  uint64_t first, taken = 0;
  Generator(DeviceIndex i, uint64_t seed)
      : GeneratorImpl(Device(kind, i), DispatchKeySet()), first(seed) {}
  void set_current_seed(uint64_t seed) override { first = seed, taken = 0; }
  void set_offset(uint64_t offset) override { taken = offset; }
  uint64_t get_offset() const override { return taken; }
  uint64_t current_seed() const override { return first; }
  uint64_t seed() override {
    set_current_seed(std::random_device()());
    return first;
  }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.itemsize() == 1, "a state has 16 bytes");
    auto at = static_cast<const char*>(state.data());
    std::memcpy(&first, at, 8), std::memcpy(&taken, at + 8, 8);
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte));
    auto to = static_cast<char*>(state.data_ptr());
    std::memcpy(to, &first, 8), std::memcpy(to + 8, &taken, 8);
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto copy = new Generator(device().index(), first);
    copy->taken = taken;
    return copy;
  }
};

at::Generator new_generator(DeviceIndex i) {
  return at::make_generator<Generator>(i < 0 ? current : i, default_rng_seed_val);
}

const at::Generator& default_generator(DeviceIndex i) {
  static auto all = [] {
    std::vector<at::Generator> made;
    for (int d = 0; d < devices; ++d) made.push_back(new_generator(d));
    return made;
  }();
  return all.at(i < 0 ? current : i);
}

template <typename Base>
struct Hooks final : Base {
  Hooks() = default;
  template <typename Args>
  explicit Hooks(Args) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current;
    if (d >= 0) current = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return is_locked(data, 1); }
  Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
  at::Generator getNewGenerator(DeviceIndex i) const override { return new_generator(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override {
    return default_generator(i);
  }
  // Only some of the interfaces have these.
  virtual bool hasCUDA() const { return true; }
  virtual bool hasXPU() const { return true; }
  virtual DeviceIndex current_device() const { return current; }
};

}  // namespace

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return kind;
}
}  // namespace at::accelerator

extern "C" {

// Makes the devices; 0 for a kind that is not known. Before PyTorch is imported.
int sim_make(const char* name, int count) {
  static Guard guard;
  std::string wanted(name);
  if (count < 1 || count > kMost) return 0;
  if (wanted == "cuda") {
    kind = DeviceType::CUDA;
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](auto&&...) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<Hooks<at::CUDAHooksInterface>>();
        });
  } else if (wanted == "xpu") {
    kind = DeviceType::XPU;
    at::XPUHooksRegistry()->Register(
        "XPUHooks", [](auto&&...) -> std::unique_ptr<at::XPUHooksInterface> {
          return std::make_unique<Hooks<at::XPUHooksInterface>>();
        });
  } else if (wanted == "privateuseone") {
    kind = DeviceType::PrivateUse1;
    static Hooks<at::PrivateUse1HooksInterface> hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
  } else {
    return 0;
  }
  devices = count;
  impl::device_guard_impl_registry[static_cast<size_t>(kind)].store(&guard);
  return 1;
}

// Looked for by programs that ask events while other threads capture graphs: 0 is global, 1 is
// thread-local, 2 is relaxed.
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
int sim_capture_mode() { return capture_mode; }

void sim_connect(const Driver* functions) { driver = *functions; }
void sim_refuse(const char* reason) {
  std::snprintf(refused, sizeof refused, "%s", reason);
}
int sim_device() { return current; }
void sim_set_device(int d) { current = static_cast<DeviceIndex>(d); }
int64_t sim_stream(int d) { return streams[d]; }
void sim_set_stream(int d, int64_t s) { streams[d] = s; }

// An event that nobody has any more, each once; 0 when there is none.
int64_t sim_dead_event() {
  std::lock_guard<std::mutex> lock(mutex);
  if (dead.empty()) return 0;
  auto event = dead.back();
  dead.pop_back();
  return event;
}

int sim_lock(uintptr_t at, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [start, length] : locked)
    if (start < at + size && at < start + length) return 0;
  locked[at] = size;
  return 1;
}
size_t sim_unlock(uintptr_t at) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = locked.find(at);
  if (found == locked.end()) return 0;
  auto size = found->second;
  locked.erase(found);
  return size;
}
int sim_is_locked(uintptr_t at, size_t size) {
  return is_locked(reinterpret_cast<const void*>(at), size);
}
size_t sim_locked_count() {
  std::lock_guard<std::mutex> lock(mutex);
  return locked.size();
}
// Where page-locked memory starts and its size, in pairs; returns how many pairs there are.
size_t sim_locked(uint64_t* pairs, size_t room) {
  std::lock_guard<std::mutex> lock(mutex);
  size_t i = 0;
  for (auto& [start, size] : locked) {
    if (i < room) pairs[2 * i] = start, pairs[2 * i + 1] = size;
    ++i;
  }
  return i;
}

}  // extern "C"
