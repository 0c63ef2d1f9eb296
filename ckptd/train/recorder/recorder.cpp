// Records collectives without Python: the same hook at the dispatcher's BackendSelect key and the
// same bytes in the ring as ckptd/train/recorder/hook.py and ckptd/monitor/ring.py.
//
// Python is asked once for each new group, element type and call site. The end of a call is stamped
// by whoever ends it, in its thread, so that it is right while another thread holds the GIL.

#include <Python.h>

#define Py_BUILD_CORE
#if PY_VERSION_HEX < 0x030c0000 && !defined(CKPTD_PUBLIC_FRAMES)
#include <internal/pycore_frame.h>
#define CKPTD_OWN_FRAMES 1
#endif
#undef Py_BUILD_CORE

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Stack = torch::jit::Stack;
using Group = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

// The layout of ckptd/monitor/ring.py; `layout` below lets the loader compare.
constexpr int64_t kHeaderBytes = 4096, kCounters = 256, kGroupBytes = 128;
constexpr int kPhase = 2, kStep = 4, kWritten = 7, kState = 11, kLost = 12;
constexpr int kAside = 3;
constexpr int kEnteredAt = 3, kCompletedAt = 4, kEntered = 5, kCompleted = 6;
constexpr uint8_t kVariable = 1, kAsync = 2, kFailed = 4, kQueued = 16, kUnseen = 32;
constexpr int kDeepest = 48;

struct Slot {
  uint64_t commit, start, end;
  int64_t bytes;
  uint32_t seq, op, dtype;
  int32_t root, step;
  uint32_t site;
  uint16_t group;
  uint8_t flags, phase;
  uint32_t padding;
};
static_assert(sizeof(Slot) == 64, "as SLOT in ringlayout.py");

int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Where the arguments of one operator are, -1 is nowhere; as CallKind in recorder_calls.py.
struct Kind {
  int index, group, tensors, root, peer, splits, async_op, reduce;
  bool is_p2p, sends, variable;
  uint32_t codes[16] = {};  // of the operation, by reduction; 0 is not asked yet
  bool without_future = false;
};

struct Row {
  int64_t* words;
  int64_t entered, completed;
  std::set<int64_t> early;
};

struct Call {
  uint64_t number = 0;
  int row = -1;
  int64_t seq = 0;
};

template <typename T>
void store(T* at, T value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

// The ring of this process as this file writes it. Everything happens under `guard`.
class Ring {
 public:
  Ring(int64_t address, int64_t slots, int64_t groups_at)
      : base_(reinterpret_cast<char*>(address)),
        slots_(slots),
        groups_at_(groups_at),
        counters_(reinterpret_cast<int64_t*>(base_ + kCounters)) {}

  void add_row(int index, int64_t entered, int64_t completed) {
    if (rows_.count(index) == 0) {
      auto words = reinterpret_cast<int64_t*>(base_ + groups_at_ + index * kGroupBytes);
      rows_[index] = std::make_unique<Row>(Row{words, entered, completed, {}});
    }
  }

  void lost() { store(&counters_[kLost], counters_[kLost] + 1); }

  void aside() { store<int64_t>(&counters_[kState], kAside); }

  void enter(Call& call, Slot slot) {
    Row& row = *rows_.at(call.row);
    slot.start = now();
    call.number = ++last_;
    call.seq = ++row.entered;
    store<int64_t>(&row.words[kEnteredAt], slot.start);
    store(&row.words[kEntered], row.entered);
    slot.commit = 0;
    slot.seq = static_cast<uint32_t>(call.seq);
    slot.group = static_cast<uint16_t>(call.row);
    slot.step = static_cast<int32_t>(counters_[kStep]);
    slot.phase = static_cast<uint8_t>(counters_[kPhase]);
    Slot* at = slot_of(call.number);
    store<uint64_t>(&at->commit, 0);
    std::atomic_thread_fence(std::memory_order_release);
    *at = slot;
    store(&at->commit, call.number);
    store<int64_t>(&counters_[kWritten], call.number);
  }

  void reached(uint64_t number) {
    Slot* slot = slot_of(number);
    if (slot->commit == number) {
      slot->flags &= static_cast<uint8_t>(~kQueued);
    }
  }

  void leave(const Call& call, bool failed, int64_t at, bool seen = true) {
    Slot* slot = slot_of(call.number);
    if (slot->commit == call.number) {
      slot->flags |= (failed ? kFailed : 0) | (seen ? 0 : kUnseen);
      store<uint64_t>(&slot->end, at);
    }
    complete(*rows_.at(call.row), call.seq, at);
  }

 private:
  Slot* slot_of(uint64_t number) {
    return reinterpret_cast<Slot*>(base_ + kHeaderBytes) + (number - 1) % slots_;
  }

  static void complete(Row& row, int64_t seq, int64_t at) {
    if (seq != row.completed + 1) {
      if (seq > row.completed) {
        row.early.insert(seq);
      }
      return;
    }
    while (row.early.erase(seq + 1) != 0) {
      ++seq;
    }
    row.completed = seq;
    store(&row.words[kCompletedAt], at);
    store(&row.words[kCompleted], seq);
  }

  char* base_;
  int64_t slots_, groups_at_;
  int64_t* counters_;
  uint64_t last_ = 0;
  std::map<int, std::unique_ptr<Row>> rows_;
};

// What the hook knows. One a process, and never destroyed: a backend may end a call at any time.
struct State {
  std::mutex guard;
  std::atomic<bool> on{false};
  std::unique_ptr<Ring> ring;
  // Numbers the lives of the hook: ends of an earlier life are not those of this one.
  uint64_t life = 0;
  PyObject* target = nullptr;
  std::string error;
  std::vector<Kind> kinds;
  std::unique_ptr<torch::Library> library;
  struct Known {
    Group group;  // held weakly, so that no other group gets its address
    int row;
    std::map<std::pair<int64_t, int64_t>, int> channels;
  };
  std::unordered_map<const void*, Known> groups;
  std::unordered_map<int, uint32_t> dtypes;
  std::unordered_map<const void*, bool> foreign;
  std::map<std::pair<const void*, const void*>, uint32_t> sites;
};

State& state() {
  static State* the = new State();
  return *the;
}

void aside(const char* what) noexcept {
  State& s = state();
  s.on = false;
  try {
    std::lock_guard<std::mutex> lock(s.guard);
    if (s.error.empty()) {
      s.error = what;
      s.ring->aside();
    }
  } catch (...) {
    // There is nothing left to say it with; `on` is false.
    return;
  }
}

// Ends a call once: when told, or when whoever could tell is gone.
class Ender {
 public:
  Ender(Call call, uint64_t life) : call_(call), life_(life) {}
  ~Ender() { end(false); }
  Ender(const Ender&) = delete;
  Ender& operator=(const Ender&) = delete;

  void end(bool failed) noexcept {
    State& s = state();
    if (done_.exchange(true) || !s.on) {
      return;
    }
    try {
      std::lock_guard<std::mutex> lock(s.guard);
      if (s.life == life_) {  // else the ring is another one now
        s.ring->leave(call_, failed, now());
      }
    } catch (const std::exception& error) {
      aside(error.what());
    }
  }

 private:
  Call call_;
  uint64_t life_;
  std::atomic<bool> done_{false};
};

// Members of Work that its subclasses may use.
struct Inside : c10d::Work {
  static auto mutex() { return &Inside::mutex_; }
  static auto completed() { return &Inside::completed_; }
  static auto error() { return &Inside::exception_; }
  static auto callback() { return &Inside::recordFunctionEndCallback_; }
};

// Sends and receives of gloo have no future; they say when they finish to the profiler alone.
void when_finished(c10d::Work& work, const std::shared_ptr<Ender>& ender) {
  std::unique_lock<std::mutex> lock(work.*Inside::mutex());
  if (work.*Inside::completed()) {
    bool failed = bool(work.*Inside::error());
    lock.unlock();
    ender->end(failed);
    return;
  }
  auto before = std::move(work.*Inside::callback());
  c10d::Work* self = &work;
  work.*Inside::callback() = [before, ender, self]() {
    if (before) {
      before();
    }
    ender->end(bool(self->*Inside::error()));
  };
}

void when_done(Kind& kind, c10d::Work& work, const std::shared_ptr<Ender>& ender) {
  if (!__atomic_load_n(&kind.without_future, __ATOMIC_RELAXED)) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work.getFuture();
    } catch (const std::exception&) {
      // This backend has none for this operator.
      __atomic_store_n(&kind.without_future, true, __ATOMIC_RELAXED);
    }
    if (future) {
      future->addCallback(
          [ender](c10::ivalue::Future& done) { ender->end(done.hasError()); }, false);
      return;
    }
  }
  when_finished(work, ender);
}

// --- arguments ----------------------------------------------------------------------------------

const at::Tensor* first_tensor(const c10::IValue& value, at::Tensor& out) {
  if (value.isTensor()) {
    out = value.toTensor();
    return &out;
  }
  if (value.isTensorList()) {
    auto list = value.toTensorList();
    if (list.empty()) {
      return nullptr;
    }
    out = list.get(0);
    return &out;
  }
  if (value.isList()) {
    auto list = value.toListRef();
    return list.empty() ? nullptr : first_tensor(list[0], out);
  }
  return nullptr;
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided ? static_cast<int64_t>(tensor.nbytes()) : -1;
}

int64_t bytes_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return bytes_of(value.toTensor());
  }
  int64_t sum = 0;
  auto add = [&sum](int64_t bytes) { sum = bytes < 0 || sum < 0 ? -1 : sum + bytes; };
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      add(bytes_of(tensor));
    }
  } else if (value.isList()) {
    for (const c10::IValue& inner : value.toListRef()) {
      add(bytes_of(inner));
    }
  }
  return sum;
}

bool is_async(const c10::IValue& value) {
  return !value.isBool() || value.toBool();
}

// --- where the call comes from ------------------------------------------------------------------

// What Python says of a code object: whether its file is the user's. Called with the GIL.
bool asked_foreign(PyCodeObject* code) {
  py::object answer = py::handle(state().target).attr("foreign")(
      py::reinterpret_borrow<py::object>(code->co_filename));
  Py_INCREF(code);  // kept for ever: its address is its name
  return answer.cast<bool>();
}

uint32_t asked_site(PyCodeObject* code, int line) {
  return py::handle(state().target)
      .attr("site")(py::reinterpret_borrow<py::object>(code->co_filename), line)
      .cast<uint32_t>();
}

#ifdef CKPTD_OWN_FRAMES
// The frames of this thread stand still while it is in here, and need no GIL to be read.
bool is_foreign(PyCodeObject* code) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.guard);
    auto found = s.foreign.find(code);
    if (found != s.foreign.end()) {
      return found->second;
    }
  }
  py::gil_scoped_acquire gil;
  bool answer = asked_foreign(code);
  std::lock_guard<std::mutex> lock(s.guard);
  return s.foreign[code] = answer;
}

uint32_t site_of(_PyInterpreterFrame* frame) {
  State& s = state();
  std::pair<const void*, const void*> key{frame->f_code, frame->prev_instr};
  {
    std::lock_guard<std::mutex> lock(s.guard);
    auto found = s.sites.find(key);
    if (found != s.sites.end()) {
      return found->second;
    }
  }
  py::gil_scoped_acquire gil;
  int at = static_cast<int>(
      frame->prev_instr - reinterpret_cast<_Py_CODEUNIT*>(frame->f_code->co_code_adaptive));
  int line = PyCode_Addr2Line(frame->f_code, at * static_cast<int>(sizeof(_Py_CODEUNIT)));
  uint32_t code = asked_site(frame->f_code, line);
  std::lock_guard<std::mutex> lock(s.guard);
  return s.sites[key] = code;
}

uint32_t site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr || thread->cframe == nullptr) {
    return 0;
  }
  _PyInterpreterFrame* frame = thread->cframe->current_frame;
  for (int depth = 0; frame != nullptr && depth < kDeepest; ++depth) {
    if (is_foreign(frame->f_code)) {
      return site_of(frame);
    }
    frame = frame->previous;
  }
  return 0;
}
#else
// Of this Python the shape of frames is not known here: the public way, which needs the GIL.
uint32_t site() {
  if (PyGILState_GetThisThreadState() == nullptr) {
    return 0;
  }
  py::gil_scoped_acquire gil;
  State& s = state();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  uint32_t found = 0;
  for (int depth = 0; frame != nullptr && depth < kDeepest && found == 0; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto known = s.foreign.find(code);
    bool foreign = known != s.foreign.end() ? known->second : asked_foreign(code);
    s.foreign[code] = foreign;
    if (foreign) {
      std::pair<const void*, const void*> key{
          code, reinterpret_cast<const void*>(static_cast<intptr_t>(PyFrame_GetLasti(frame)))};
      auto site = s.sites.find(key);
      if (site == s.sites.end()) {
        site = s.sites.emplace(key, asked_site(code, PyFrame_GetLineNumber(frame))).first;
      }
      found = site->second;
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}
#endif

// --- groups and texts ---------------------------------------------------------------------------

// Row of a group or channel, asked of Python; -1 where there is no room.
int asked_row(const Kind& kind, const c10::IValue& group, int64_t peer) {
  py::gil_scoped_acquire gil;
  py::tuple found =
      py::handle(state().target).attr("row")(kind.index, torch::jit::toPyObject(group), peer);
  int row = found[0].cast<int>();
  if (row >= 0) {
    auto entered = found[1].cast<int64_t>();
    std::lock_guard<std::mutex> lock(state().guard);
    state().ring->add_row(row, entered, entered);
  }
  return row;
}

int row_of(const Kind& kind, const c10::IValue& value, int64_t peer) {
  State& s = state();
  auto group = value.toCustomClass<c10d::ProcessGroup>();
  const void* key = group.get();
  std::pair<int64_t, int64_t> ends{-2, -2};
  if (kind.is_p2p) {
    int64_t me = group->getRank();
    ends = kind.sends ? std::make_pair(me, peer) : std::make_pair(peer, me);
  }
  {
    std::lock_guard<std::mutex> lock(s.guard);
    auto known = s.groups.find(key);
    if (known != s.groups.end()) {
      auto row = known->second.channels.find(ends);
      if (row != known->second.channels.end()) {
        return row->second;
      }
    }
  }
  int row = asked_row(kind, value, peer);
  std::lock_guard<std::mutex> lock(s.guard);
  auto known = s.groups.find(key);
  if (known == s.groups.end()) {
    known = s.groups.emplace(key, State::Known{Group(group), -1, {}}).first;
  }
  known->second.channels[ends] = row;
  return row;
}

uint32_t dtype_code(const at::Tensor& tensor) {
  State& s = state();
  int type = static_cast<int>(tensor.scalar_type());
  {
    std::lock_guard<std::mutex> lock(s.guard);
    auto found = s.dtypes.find(type);
    if (found != s.dtypes.end()) {
      return found->second;
    }
  }
  py::gil_scoped_acquire gil;
  auto code = py::handle(s.target).attr("dtype")(tensor).cast<uint32_t>();
  std::lock_guard<std::mutex> lock(s.guard);
  return s.dtypes[type] = code;
}

uint32_t op_code(Kind& kind, const Stack& stack, size_t first) {
  size_t which = 0;
  if (kind.reduce >= 0) {
    which = static_cast<size_t>(stack[first + kind.reduce].toCustomClass<c10d::ReduceOp>()->op_);
    which = which < std::size(kind.codes) ? which : 0;
  }
  uint32_t code = __atomic_load_n(&kind.codes[which], __ATOMIC_RELAXED);
  if (code == 0) {
    py::gil_scoped_acquire gil;
    code = py::handle(state().target).attr("op")(kind.index, which).cast<uint32_t>();
    __atomic_store_n(&kind.codes[which], code, __ATOMIC_RELAXED);
  }
  return code;
}

// --- the hook -----------------------------------------------------------------------------------

// A call that has begun; what it writes only where an accelerator makes it.
struct Started {
  Call call;
  bool begun = false, on_cpu = true;  // on_cpu: the host ends it
  at::Tensor output;
};

void begin(Kind& kind, const Stack& stack, size_t first, Started& out) {
  State& s = state();
  int64_t peer = kind.peer < 0 ? -1 : stack[first + kind.peer].toInt();
  out.call.row = row_of(kind, stack[first + kind.group], peer);
  if (out.call.row < 0) {
    std::lock_guard<std::mutex> lock(s.guard);
    s.ring->lost();
    return;
  }
  Slot slot{};
  const c10::IValue& tensors = stack[first + std::max(kind.tensors, 0)];
  at::Tensor held;
  const at::Tensor* tensor = first_tensor(tensors, held);
  if (tensor != nullptr && kind.tensors >= 0) {
    slot.bytes = bytes_of(tensors);
    slot.dtype = dtype_code(*tensor);
  }
  out.on_cpu = tensor == nullptr || tensor->device().is_cpu();
  if (!out.on_cpu) {
    first_tensor(stack[first], out.output);
    slot.flags |= kQueued;
  }
  slot.op = op_code(kind, stack, first);
  slot.root = kind.root < 0 ? -1 : static_cast<int32_t>(stack[first + kind.root].toInt());
  if (kind.async_op >= 0 && is_async(stack[first + kind.async_op])) {
    slot.flags |= kAsync;
  }
  bool split = kind.splits >= 0 && !stack[first + kind.splits].toIntVector().empty();
  slot.flags |= kind.variable || split ? kVariable : 0;
  slot.site = site();
  {
    std::lock_guard<std::mutex> lock(s.guard);
    s.ring->enter(out.call, slot);
    out.begun = true;
  }
  if (!out.on_cpu) {
    // An event between what was enqueued before and the call itself tells the two apart.
    py::gil_scoped_acquire gil;
    py::handle(s.target).attr("enqueue")(out.call.row, out.call.number, out.call.seq, *tensor);
  }
}

void refused(const Started& started, uint64_t life) {
  if (!started.on_cpu) {
    py::gil_scoped_acquire gil;
    if (state().life == life) {
      py::handle(state().target).attr("refused")(started.call.number);
    }
  }
  Ender(started.call, life).end(true);
}

void launched(Kind& kind, const Started& started, uint64_t life, const c10::IValue* result) {
  const Call& call = started.call;
  if (!started.on_cpu) {
    // It ends when the device says so, which Python watches.
    py::gil_scoped_acquire gil;
    if (state().life != life) {
      return;  // it was begun in another ring
    }
    py::object work = py::none();
    if (result != nullptr) {
      work = torch::jit::toPyObject(*result);
    }
    py::handle(state().target).attr("taken")(call.number, work, started.output);
    return;
  }
  auto ender = std::make_shared<Ender>(call, life);
  if (result != nullptr) {
    when_done(kind, *result->toCustomClass<c10d::Work>(), ender);
  }
}

class Hook final : public c10::OperatorKernel {
 public:
  explicit Hook(Kind* kind) : kind_(kind) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    static const c10::DispatchKeySet below(
        c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    State& s = state();
    if (!s.on) {
      op.redispatchBoxed(keys & below, stack);
      return;
    }
    Started started;
    uint64_t life = s.life;
    try {
      begin(*kind_, *stack, stack->size() - op.schema().arguments().size(), started);
    } catch (const std::exception& error) {
      aside(error.what());
    }
    try {
      op.redispatchBoxed(keys & below, stack);
    } catch (...) {
      if (started.begun) {
        try {
          refused(started, life);
        } catch (const std::exception& error) {
          aside(error.what());
        }
      }
      throw;
    }
    if (!started.begun) {
      return;
    }
    try {
      bool work = !op.schema().returns().empty() && stack->back().isObject();
      launched(*kind_, started, life, work ? &stack->back() : nullptr);
    } catch (const std::exception& error) {
      aside(error.what());
    }
  }

 private:
  Kind* kind_;
};

// --- for Python ---------------------------------------------------------------------------------

void install(const py::list& operators) {
  State& s = state();
  if (s.library) {
    throw std::runtime_error("the native recorder is installed already");
  }
  s.kinds.clear();
  s.kinds.reserve(operators.size());
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (const auto& item : operators) {
    auto row = item.cast<py::dict>();
    auto at = [&row](const char* name) { return row[name].cast<int>(); };
    Kind kind{
        at("index"), at("group"),  at("tensors"), at("root"),
        at("peer"),  at("splits"), at("async_op"), at("reduce"),
        row["is_p2p"].cast<bool>(), row["sends"].cast<bool>(), row["variable"].cast<bool>()};
    s.kinds.push_back(kind);
    library->impl(
        row["operator"].cast<std::string>().c_str(),
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Hook>(&s.kinds.back())));
  }
  s.library = std::move(library);
}

// Begin to write into a ring.
void begin_life(int64_t address, int64_t slots, int64_t groups_at, py::object target) {
  State& s = state();
  s.on = false;
  py::object before;  // goes after the lock
  std::lock_guard<std::mutex> lock(s.guard);
  for (Kind& kind : s.kinds) {
    std::fill(std::begin(kind.codes), std::end(kind.codes), 0);
  }
  ++s.life;
  s.ring = std::make_unique<Ring>(address, slots, groups_at);
  s.groups.clear();
  s.dtypes.clear();
  s.sites.clear();
  s.foreign.clear();
  s.error.clear();
  before = py::reinterpret_steal<py::object>(s.target);
  s.target = target.release().ptr();
  s.on = true;
}

// Write nothing any more. Returns once nobody writes.
void end_life() {
  State& s = state();
  s.on = false;
  py::gil_scoped_release free;
  std::lock_guard<std::mutex> lock(s.guard);
  ++s.life;
}

void uninstall() {
  end_life();
  state().library.reset();
}

// Take note that an accelerator has come to a call.
void reached(uint64_t number, uint64_t life) {
  State& s = state();
  if (s.on) {
    std::lock_guard<std::mutex> lock(s.guard);
    if (s.life == life) {
      s.ring->reached(number);
    }
  }
}

// End a call of an accelerator, at a monotonic time in nanoseconds; 0 is now. What is not seen has
// ended or goes on.
void leave(
    int row, uint64_t number, int64_t seq, bool failed, int64_t at, bool seen, uint64_t life) {
  State& s = state();
  if (s.on) {
    std::lock_guard<std::mutex> lock(s.guard);
    if (s.life == life) {
      s.ring->leave(Call{number, row, seq}, failed, at > 0 ? at : now(), seen);
    }
  }
}

py::dict layout() {
  py::dict out;
  out["header"] = kHeaderBytes;
  out["counters"] = kCounters;
  out["slot"] = sizeof(Slot);
  out["slot_group"] = offsetof(Slot, group);
  out["slot_end"] = offsetof(Slot, end);
  out["group"] = kGroupBytes;
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", &install);
  m.def("begin", &begin_life);
  m.def("end", &end_life);
  m.def("uninstall", &uninstall);
  m.def("reached", &reached);
  m.def("leave", &leave);
  m.def("layout", &layout);
  m.def("life", []() { return state().life; });
  m.def("stop", []() { state().on = false; });
  m.def("error", []() { return state().error; });
}
