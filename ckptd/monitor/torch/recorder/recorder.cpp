// Records collectives without Python: the same hook at the dispatcher's BackendSelect key and the
// same bytes in the ring as ckptd/monitor/torch/recorder/hook.py and ckptd/monitor/ring.py.
//
// Python is asked once for each new group, element type and call site. The end of a call is stamped
// by whoever ends it, in its thread, so that it is right while another thread holds the GIL. A call
// of an accelerator ends when events on its streams say so, as in ckptd/monitor/torch/recorder/ends.py.

#include <Python.h>

#define Py_BUILD_CORE
#if PY_VERSION_HEX < 0x030c0000 && !defined(CKPTD_PUBLIC_FRAMES)
#include <internal/pycore_frame.h>
#define CKPTD_OWN_FRAMES 1
#endif
#undef Py_BUILD_CORE

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

// As torch/csrc/jit/python/pybind_utils.h has it, which costs the compiler a fifth of its time.
namespace torch::jit {
TORCH_PYTHON_API py::object toPyObject(c10::IValue value);
}

namespace {

using Stack = std::vector<c10::IValue>;
using Group = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

// The layout of ckptd/monitor/ring.py; `layout` below lets the loader compare.
constexpr int64_t kHeaderBytes = 4096, kCounters = 256, kGroupBytes = 128;
constexpr int kPhase = 2, kStep = 4, kWritten = 7, kState = 11, kLost = 12;
constexpr int kAside = 3;
constexpr int kEnteredAt = 3, kCompletedAt = 4, kEntered = 5, kCompleted = 6;
constexpr uint8_t kVariable = 1, kAsync = 2, kFailed = 4, kQueued = 16, kUnseen = 32;
constexpr int kDeepest = 48;
constexpr size_t kMostPending = 4096, kMostIdle = 256;  // calls of devices, events for those to come
constexpr int64_t kAnchorNs = 60'000'000'000;

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
static_assert(sizeof(Slot) == 64, "as SLOT in monitor/ring.py");

int64_t now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Where the arguments of one operator are, -1 is nowhere; as CallKind in calls.py.
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

// An event to count milliseconds of a device from. Only the thread that looks has its clock: the
// least difference to the host's that was ever seen is nearest to the truth.
struct Anchor {
  Anchor(c10::Event made, int64_t end) : event(std::move(made)), until(end) {}

  c10::Event event;
  int64_t until;
  double offset = std::numeric_limits<double>::infinity();

  int64_t host_ns(const c10::Event& end, int64_t seen) {
    double moment;
    try {
      moment = event.elapsedTime(end) * 1e6;
    } catch (const std::exception&) {
      return seen;  // the device has no clock for events
    }
    offset = std::min(offset, static_cast<double>(seen) - moment);
    return std::min(seen, static_cast<int64_t>(offset + moment));
  }
};

// A call that is enqueued on a device, from before it is until its end is known. What changes is
// under `guard`.
struct Queued {
  Queued(Call c, uint64_t number, const c10::Stream& stream, std::shared_ptr<c10::Event> event)
      : call(c),
        life(number),
        device(stream.device()),
        begun_on(stream),
        end_on(stream),
        begun(std::move(event)) {}

  Call call;
  uint64_t life;
  c10::Device device;
  c10::Stream begun_on, end_on;
  std::shared_ptr<c10::Event> begun;  // behind what was enqueued before it; until the device is there
  std::shared_ptr<c10::Event> end;    // behind the program's wait
  std::shared_ptr<Anchor> anchor;
  c10::intrusive_ptr<c10d::Work> work;  // until somebody has waited for it
  const void* written = nullptr;        // the memory that it writes
  std::atomic<bool> over{false};
};
using QueuedPtr = std::shared_ptr<Queued>;

// How calls on one kind of device are followed.
enum class How : int { unasked, not_at_all, never_captured, asked_of_guard, asked_of_python };

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

  // Of accelerators.
  std::array<std::atomic<How>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> how{};
  std::deque<QueuedPtr> pending;
  std::vector<QueuedPtr> taken;       // those whose work nobody has waited for yet: few
  std::atomic<bool> awaited{false};  // whether there is any of these
  std::map<std::pair<std::pair<int, int>, bool>, std::vector<std::shared_ptr<c10::Event>>> idle;
  std::map<std::pair<int, int>, std::shared_ptr<Anchor>> anchors;
  std::map<std::pair<int, int>, bool> may_ask;
  PyObject* wait = nullptr;        // of Work, as it was found
  PyTypeObject* work = nullptr;    // Work itself
  PyObject* coalescing = nullptr;  // torch's table of groups whose calls are coalesced now
  std::unique_ptr<torch::Library> waits;
  // Of Python's look at the inputs of sums; kinds by their index.
  std::atomic<bool> looks{false};
  std::set<int> looked_at;
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

// --- calls of accelerators ----------------------------------------------------------------------

std::pair<int, int> key_of(const c10::Device& device) {
  return {static_cast<int>(device.type()), static_cast<int>(device.index())};
}

// Templates, so that a PyTorch without the question is told from one with it.
template <typename Guard>
constexpr bool kGuardKnowsCaptures =
    requires(const Guard& guard, const c10::Stream& stream) { guard.isStreamCapturing(stream); };

template <typename Guard>
bool guard_captures(const Guard& guard, const c10::Stream& stream) {
  if constexpr (kGuardKnowsCaptures<Guard>) {
    return guard.isStreamCapturing(stream);
  }
  return false;
}

bool is_capturing(const c10::Stream& stream) {
  How how = state().how[static_cast<size_t>(stream.device_type())];
  if (how == How::asked_of_guard) {
    return guard_captures(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
  }
  if (how == How::asked_of_python) {
    py::gil_scoped_acquire gil;
    return py::handle(state().target).attr("captures")(stream.device()).cast<bool>();
  }
  return false;
}

How asked_how(const c10::Device& device) {
  py::gil_scoped_acquire gil;
  py::object answer = py::handle(state().target).attr("follows")(device);
  if (answer.is_none()) {
    return How::not_at_all;
  }
  if (!answer.cast<bool>()) {
    return How::never_captured;
  }
  // Guards of other kinds may have the question from their base, which answers no.
  bool answers = device.is_cuda() || device.is_hip() || device.is_xpu();
  return answers && kGuardKnowsCaptures<c10::impl::VirtualGuardImpl> ? How::asked_of_guard
                                                                     : How::asked_of_python;
}

// The stream that a call is about to be enqueued on; none where nobody will know when it ends.
std::optional<c10::Stream> followed_stream(const c10::Device& device) {
  std::atomic<How>& how = state().how[static_cast<size_t>(device.type())];
  if (how == How::unasked) {
    how = asked_how(device);
  }
  if (how == How::not_at_all) {
    return std::nullopt;
  }
  c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (is_capturing(stream)) {
    return std::nullopt;
  }
  return stream;
}

// An event that has done its work, under the lock. An event is of the device that it was first
// recorded on.
std::shared_ptr<c10::Event> idle_event(State& s, const c10::Device& device, bool timing) {
  auto& idle = s.idle[{key_of(device), timing}];
  if (idle.empty()) {
    return nullptr;
  }
  auto event = std::move(idle.back());
  idle.pop_back();
  return event;
}

// Put an event, or a new one, behind what a stream holds by now. Without the lock: the driver may be
// one in Python.
void record(std::shared_ptr<c10::Event>& event, const c10::Stream& stream, bool timing) {
  if (!event) {
    event = std::make_shared<c10::Event>(
        stream.device_type(),
        timing ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  }
  event->record(stream);
}

void give_back(State& s, const c10::Device& device, std::shared_ptr<c10::Event> event, bool timing) {
  auto& idle = s.idle[{key_of(device), timing}];
  if (idle.size() < kMostIdle) {
    idle.push_back(std::move(event));
  }
}

// Wait no more for a call, under the lock. What is returned is let go of without it: the tensors of
// a work may be of Python.
c10::intrusive_ptr<c10d::Work> forgotten(State& s, Queued& queued) {
  auto work = std::move(queued.work);
  if (work) {
    auto at = std::find_if(s.taken.rbegin(), s.taken.rend(), [&queued](const QueuedPtr& each) {
      return each.get() == &queued;
    });
    if (at != s.taken.rend()) {
      s.taken.erase(std::next(at).base());
      s.awaited = !s.taken.empty();
    }
  }
  return work;
}

void end(Queued& queued, bool failed, int64_t at, bool seen) {
  State& s = state();
  c10::intrusive_ptr<c10d::Work> work;
  std::lock_guard<std::mutex> lock(s.guard);
  if (queued.over.exchange(true)) {
    return;
  }
  work = forgotten(s, queued);
  if (s.on && s.life == queued.life) {
    s.ring->leave(queued.call, failed, at > 0 ? at : now(), seen);
  }
}

// Put a call that is about to be enqueued behind others, under the lock; return one that is to end:
// nobody could look at so many in time. For ever under way, they would look like a hang.
QueuedPtr pushed(State& s, QueuedPtr queued) {
  s.pending.push_back(std::move(queued));
  if (s.pending.size() <= kMostPending) {
    return nullptr;
  }
  auto oldest = std::move(s.pending.front());
  s.pending.pop_front();
  return oldest;
}

// The backend has taken a call. One that is coalesced with others has no work, or one that counts
// as completed before it has begun: nobody will know when it ends.
void taken(const QueuedPtr& queued, c10::intrusive_ptr<c10d::Work> work, const at::Tensor& output) {
  State& s = state();
  // A size is read whole without the GIL.
  if (!work || (s.coalescing != nullptr && PyDict_GET_SIZE(s.coalescing) > 0)) {
    end(*queued, false, 0, false);
    return;
  }
  std::lock_guard<std::mutex> lock(s.guard);
  if (queued->over) {
    return;
  }
  queued->work = std::move(work);
  if (output.defined() && output.has_storage()) {
    queued->written = output.storage().unsafeGetStorageImpl();
  }
  s.taken.push_back(queued);
  s.awaited = true;
}

// The program has waited for a call: what its stream holds from now on runs behind it.
void waited(Queued& queued, bool failed) {
  State& s = state();
  c10::Stream stream = c10::impl::VirtualGuardImpl(queued.device.type()).getStream(queued.device);
  if (failed || is_capturing(stream)) {
    end(queued, failed, 0, failed);
    return;
  }
  std::shared_ptr<Anchor> anchor;
  std::shared_ptr<c10::Event> event;
  {
    std::lock_guard<std::mutex> lock(s.guard);
    anchor = s.anchors[key_of(queued.device)];
    event = idle_event(s, queued.device, true);
  }
  if (!anchor || anchor->until < now()) {
    anchor = std::make_shared<Anchor>(
        c10::Event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT), now() + kAnchorNs);
    anchor->event.record(stream);
    std::lock_guard<std::mutex> lock(s.guard);
    s.anchors[key_of(queued.device)] = anchor;
  }
  record(event, stream, true);
  c10::intrusive_ptr<c10d::Work> work;
  std::lock_guard<std::mutex> lock(s.guard);
  if (!queued.over) {
    queued.end_on = stream;
    queued.end = event;
    queued.anchor = anchor;
    work = forgotten(s, queued);
  }
}

// Whether a work that is completed has failed, as far as its backend says. A future of NCCL's that
// is done says only that the call was enqueued; its other one has the result.
bool has_failed(c10d::Work& work) {
  try {
    auto result = work.getFutureResult();
    return result->completed() && (result->hasError() || result->value().toInt() != 0);
  } catch (const std::exception&) {
    try {
      auto future = work.getFuture();
      return future->completed() && future->hasError();
    } catch (const std::exception&) {
      return false;
    }
  }
}

bool may_ask(const c10::Device& device) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.guard);
    auto known = s.may_ask.find(key_of(device));
    if (known != s.may_ask.end()) {
      return known->second;
    }
  }
  bool may;
  {
    py::gil_scoped_acquire gil;
    may = py::handle(s.target).attr("may_ask")(device).cast<bool>();
  }
  if (!may) {
    s.how[static_cast<size_t>(device.type())] = How::not_at_all;
  }
  std::lock_guard<std::mutex> lock(s.guard);
  return s.may_ask[key_of(device)] = may;
}

// One look at what devices have come to and ended; events are asked without the lock.
class Look {
 public:
  Look() {
    std::lock_guard<std::mutex> lock(state().guard);
    todo_.swap(state().pending);
  }
  ~Look() {
    // Before what was enqueued meanwhile: the order is that of the queues.
    std::lock_guard<std::mutex> lock(state().guard);
    auto& pending = state().pending;
    pending.insert(pending.begin(), todo_.begin(), todo_.end());
    pending.insert(pending.begin(), kept_.begin(), kept_.end());
  }
  Look(const Look&) = delete;
  Look& operator=(const Look&) = delete;

  void run() {
    while (!todo_.empty()) {
      QueuedPtr queued = todo_.front();
      bool over = queued->over;
      if (!over && !may_ask(queued->device)) {
        end(*queued, false, 0, false);
        over = true;
      }
      over = over || is_over(*queued);
      todo_.pop_front();
      if (!over) {
        kept_.push_back(std::move(queued));
      }
    }
  }

 private:
  bool is_over(Queued& queued) {
    State& s = state();
    int64_t seen = now();
    std::shared_ptr<c10::Event> begun, event;
    std::shared_ptr<Anchor> anchor;
    c10::intrusive_ptr<c10d::Work> work;
    c10::Stream end_on = queued.begun_on;
    {
      std::lock_guard<std::mutex> lock(s.guard);
      begun = queued.begun;
      event = queued.end;
      anchor = queued.anchor;
      work = queued.work;
      end_on = queued.end_on;
    }
    if (begun) {
      if (!has_come(*begun, queued.begun_on, ahead_)) {
        return false;
      }
      std::lock_guard<std::mutex> lock(s.guard);
      queued.begun.reset();
      give_back(s, queued.device, std::move(begun), false);
      if (!queued.over && s.life == queued.life) {
        s.ring->reached(queued.call.number);
      }
    }
    if (event) {
      if (!has_come(*event, end_on, open_) || !anchor->event.query()) {
        return false;
      }
      end(queued, false, anchor->host_ns(*event, seen), true);
      std::lock_guard<std::mutex> lock(s.guard);
      give_back(s, queued.device, std::move(event), true);
      return true;
    }
    if (!work || !work->isCompleted()) {
      return false;
    }
    end(queued, has_failed(*work), seen, true);
    return true;
  }

  // A queue is in order: behind an event that has not come none has.
  static bool has_come(
      const c10::Event& event, const c10::Stream& stream, std::vector<c10::Stream>& closed) {
    if (std::find(closed.begin(), closed.end(), stream) != closed.end()) {
      return false;
    }
    if (event.query()) {
      return true;
    }
    closed.push_back(stream);
    return false;
  }

  std::deque<QueuedPtr> todo_, kept_;
  std::vector<c10::Stream> ahead_, open_;
};

void look() {
  if (state().on) {
    Look().run();
  }
}

template <typename Test>
QueuedPtr newest_taken(Test test) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.guard);
  auto at = std::find_if(s.taken.rbegin(), s.taken.rend(), test);
  return at == s.taken.rend() ? nullptr : *at;
}

// The method `wait` of Work.
PyObject* watched_wait(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  State& s = state();
  QueuedPtr queued;
  if (s.on && s.awaited && PyVectorcall_NARGS(count) > 0 && PyObject_TypeCheck(args[0], s.work)) {
    // A cast would look types up: of this object there is only the address to compare.
    auto* instance = reinterpret_cast<py::detail::instance*>(args[0]);
    const void* work = instance->get_value_and_holder().value_ptr();
    queued = newest_taken([work](const QueuedPtr& each) { return each->work.get() == work; });
  }
  PyObject* result = PyObject_Vectorcall(s.wait, args, static_cast<size_t>(count), names);
  if (queued) {
    py::error_scope kept;
    try {
      waited(*queued, result == nullptr);
    } catch (const std::exception& error) {
      aside(error.what());
    }
  }
  return result;
}

// The operator with which functional calls wait, below Python.
class WatchedWait final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    static const c10::DispatchKeySet below(
        c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    op.redispatchBoxed(keys & below, stack);
    State& s = state();
    if (!s.on || !s.awaited || !stack->back().isTensor()) {
      return;
    }
    try {
      at::Tensor tensor = stack->back().toTensor();
      if (tensor.has_storage()) {
        const void* written = tensor.storage().unsafeGetStorageImpl();
        auto queued = newest_taken(
            [written](const QueuedPtr& each) { return each->written == written; });
        if (queued) {
          waited(*queued, false);
        }
      }
    } catch (const std::exception& error) {
      aside(error.what());
    }
  }
};

// Watch waits from now on; return what is to be the method `wait` of Work.
py::object watch_waits(py::object work, py::object wait, py::dict coalescing) {
  static PyMethodDef method{
      "wait",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&watched_wait)),
      METH_FASTCALL | METH_KEYWORDS,
      nullptr};
  State& s = state();
  s.wait = wait.release().ptr();  // for ever: a thread may be in it
  s.work = reinterpret_cast<PyTypeObject*>(work.release().ptr());
  s.coalescing = coalescing.release().ptr();
  s.waits = std::make_unique<torch::Library>(
      torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  s.waits->impl(
      "wait_tensor", torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WatchedWait>()));
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
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

size_t reduction_of(const Kind& kind, const Stack& stack, size_t first) {
  if (kind.reduce < 0) {
    return 0;
  }
  auto which = static_cast<size_t>(stack[first + kind.reduce].toCustomClass<c10d::ReduceOp>()->op_);
  return which < std::size(kind.codes) ? which : 0;
}

uint32_t op_code(Kind& kind, const Stack& stack, size_t first) {
  size_t which = reduction_of(kind, stack, first);
  uint32_t code = __atomic_load_n(&kind.codes[which], __ATOMIC_RELAXED);
  if (code == 0) {
    py::gil_scoped_acquire gil;
    code = py::handle(state().target).attr("op")(kind.index, which).cast<uint32_t>();
    __atomic_store_n(&kind.codes[which], code, __ATOMIC_RELAXED);
  }
  return code;
}

// --- the hook -----------------------------------------------------------------------------------

// A call that has begun; `output`, what it writes, only where an accelerator makes it.
struct Started {
  Call call;
  bool begun = false, on_cpu = true;  // on_cpu: the host ends it
  QueuedPtr queued;  // none on an accelerator where nobody will know when it ends
  at::Tensor output;
};

void begin(Kind& kind, const Stack& stack, size_t first, uint64_t life, Started& out) {
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
  std::optional<c10::Stream> stream;
  if (!out.on_cpu) {
    first_tensor(stack[first], out.output);
    stream = followed_stream(tensor->device());
    slot.flags |= stream ? kQueued : 0;
  }
  slot.op = op_code(kind, stack, first);
  slot.root = kind.root < 0 ? -1 : static_cast<int32_t>(stack[first + kind.root].toInt());
  if (kind.async_op >= 0 && is_async(stack[first + kind.async_op])) {
    slot.flags |= kAsync;
  }
  bool split = kind.splits >= 0 && !stack[first + kind.splits].toIntVector().empty();
  slot.flags |= kind.variable || split ? kVariable : 0;
  slot.site = site();
  std::shared_ptr<c10::Event> event;
  if (stream) {
    // An event between what was enqueued before and the call itself tells the two apart.
    {
      std::lock_guard<std::mutex> lock(s.guard);
      event = idle_event(s, stream->device(), false);
    }
    record(event, *stream, false);
  }
  QueuedPtr oldest;
  {
    std::lock_guard<std::mutex> lock(s.guard);
    s.ring->enter(out.call, slot);
    out.begun = true;
    if (stream) {
      out.queued = std::make_shared<Queued>(out.call, life, *stream, std::move(event));
      oldest = pushed(s, out.queued);
    }
  }
  if (oldest) {
    end(*oldest, false, 0, false);
  }
  if (s.looks && s.looked_at.count(kind.index) != 0) {
    py::gil_scoped_acquire gil;
    py::handle(s.target).attr("look")(
        kind.index, reduction_of(kind, stack, first), torch::jit::toPyObject(tensors),
        out.call.row, out.call.seq);
  }
}

void refused(const Started& started, uint64_t life) {
  if (started.queued) {
    end(*started.queued, true, 0, true);
  } else {
    Ender(started.call, life).end(true);
  }
}

void launched(Kind& kind, const Started& started, uint64_t life, const c10::IValue* result) {
  const Call& call = started.call;
  if (!started.on_cpu) {
    c10::intrusive_ptr<c10d::Work> work;
    if (result != nullptr) {
      work = result->toCustomClass<c10d::Work>();
    }
    if (started.queued) {
      taken(started.queued, std::move(work), started.output);
    } else {
      State& s = state();
      std::lock_guard<std::mutex> lock(s.guard);
      if (s.on && s.life == life) {
        s.ring->leave(call, false, now(), false);
      }
    }
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
      begin(*kind_, *stack, stack->size() - op.schema().arguments().size(), life, started);
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

// What is known of calls of devices, to be let go of without the lock.
struct Calls {
  std::deque<QueuedPtr> pending;
  std::vector<QueuedPtr> taken;
};

Calls all_forgotten(State& s) {
  Calls calls{std::move(s.pending), std::move(s.taken)};
  s.pending.clear();
  s.taken.clear();
  s.awaited = false;
  s.anchors.clear();
  s.may_ask.clear();
  return calls;
}

// Begin to write into a ring.
void begin_life(int64_t address, int64_t slots, int64_t groups_at, py::object target) {
  State& s = state();
  s.on = false;
  py::object before;  // these go after the lock
  Calls calls;
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
  calls = all_forgotten(s);
  std::fill(s.how.begin(), s.how.end(), How::unasked);
  before = py::reinterpret_steal<py::object>(s.target);
  s.target = target.release().ptr();
  s.on = true;
}

// Show Python the inputs of calls of these kinds before the backend has them.
void look_at(const std::set<int>& kinds) {
  State& s = state();
  s.looked_at = kinds;
  s.looks = !kinds.empty();
}

// Write nothing any more. Returns once nobody writes.
void end_life() {
  State& s = state();
  s.on = false;
  py::gil_scoped_release free;
  Calls calls;
  std::lock_guard<std::mutex> lock(s.guard);
  ++s.life;
  calls = all_forgotten(s);
}

void uninstall() {
  end_life();
  state().looks = false;
  state().library.reset();
  state().waits.reset();
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
  m.def("look", &look, py::call_guard<py::gil_scoped_release>());
  m.def("watch_waits", &watch_waits);
  m.def("layout", &layout);
  m.def("look_at", &look_at);
  m.def("stop", []() { state().on = false; });
  m.def("error", []() { return state().error; });
}
