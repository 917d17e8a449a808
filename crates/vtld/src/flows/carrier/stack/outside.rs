//! Layers that are compiled outside of VTL: shared objects in a directory of root's (`include/vtl-layer.h`).
//!
//! vtld itself only looks whether a file is there. The process of stacks loads all when it starts, after it has given up its
//! privileges, and before the filter that forbids it to map code.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_char, c_void},
    fs,
    path::Path,
    time::Duration,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vtl_core::layers::{Built, Description, Layer, MAX_PACKET, Ns, Out, Packet, Unfit};
use vtl_proto::carrier::GraftSpec;

use crate::stacks::{layer_directory, layer_file};

/// Version of the interface (`VTL_LAYER_ABI`), and the longest header (`VTL_LAYER_MAX_HEADER`).
const ABI: u32 = 1;
const MAX_HEADER: u32 = 64;
/// Maximum number of layers.
const MAX_LAYERS: usize = 64;

/// `struct vtl_layer_out`.
#[repr(C)]
struct CallOut {
    context: *mut c_void,
    down: unsafe extern "C" fn(*mut c_void, *const u8, usize),
    up: unsafe extern "C" fn(*mut c_void, *const u8, usize),
    refuse: unsafe extern "C" fn(*mut c_void),
}

type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type Destroy = unsafe extern "C" fn(*mut c_void);
type OnPacket = unsafe extern "C" fn(*mut c_void, u64, *const u8, usize, *const CallOut);
type Poll = unsafe extern "C" fn(*mut c_void, u64, usize, *const CallOut);
type NextTimeout = unsafe extern "C" fn(*mut c_void) -> u64;

/// `struct vtl_layer`.
#[repr(C)]
struct Functions {
    abi: u32,
    header: u32,
    create: Option<Create>,
    destroy: Option<Destroy>,
    send: Option<OnPacket>,
    receive: Option<OnPacket>,
    poll: Option<Poll>,
    next_timeout: Option<NextTimeout>,
}

/// A layer's functions, complete.
#[derive(Clone, Copy)]
struct Complete {
    header: u32,
    create: Create,
    destroy: Destroy,
    send: OnPacket,
    receive: OnPacket,
    /// Both or neither.
    timed: Option<(Poll, NextTimeout)>,
}

/// The layers that this process has loaded.
#[derive(Default)]
pub(crate) struct Outside(BTreeMap<String, Complete>);

impl Outside {
    /// Loads all layers of the directory. One that cannot be is logged and left out.
    pub(crate) fn load() -> Self {
        let entries = layer_directory().map(fs::read_dir);
        let entries = entries.and_then(Result::ok).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some(name.strip_suffix(".so")?.to_owned())
        });
        let mut all = BTreeMap::new();
        for name in names.take(MAX_LAYERS) {
            match layer_file(&name)
                .map_err(|error| error.to_string())
                .and_then(|file| load(&file))
            {
                Ok(functions) => drop(all.insert(name, functions)),
                Err(error) => tracing::warn!(%error, layer = %name, "stacks: layer refused"),
            }
        }
        Self(all)
    }

    fn knows(&self, layer: &GraftSpec) -> bool {
        self.0.contains_key(&layer.name)
    }

    /// Makes a stack's layers of what they are as text. `rtt`: the path's round-trip time, if it is known; `over_messages`:
    /// whether they are over a carrier that moves messages, which the text must say as well.
    pub(crate) fn build(
        &self,
        text: &str,
        rtt: Option<Duration>,
        over_messages: bool,
    ) -> Result<(Description, Built), String> {
        let build = || {
            let description: Description = text.parse()?;
            if description.is_over_messages() != over_messages {
                return Err(Unfit::Carrier(description.carrier().to_owned()));
            }
            let rtt = rtt.map(|rtt| rtt.as_nanos() as u64);
            let made =
                description.build(rtt, |layer| self.knows(layer), |layer| self.make(layer))?;
            Ok((description, made))
        };
        build().map_err(|unfit: Unfit| unfit.to_string())
    }

    /// Makes a layer; `None` if there is none, or it refuses the parameters.
    fn make(&self, layer: &GraftSpec) -> Option<Box<dyn Layer>> {
        let functions = *self.0.get(&layer.name)?;
        let text = layer.to_string();
        let params = text.split_once('?').map_or("", |(_, params)| params);
        let params = CString::new(params).ok()?;
        // SAFETY: the functions are as vtl-layer.h has them, and the text ends with a zero.
        let state = unsafe { (functions.create)(params.as_ptr()) };
        (!state.is_null()).then(|| Box::new(Made { functions, state }) as Box<dyn Layer>)
    }
}

/// Loads a layer. It stays loaded.
fn load(file: &Path) -> Result<Complete, String> {
    // SAFETY: root has put the file there, to be run here.
    let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| error.to_string())?;
    // SAFETY: a symbol of that name has this type by vtl-layer.h.
    let entry = unsafe { library.get::<unsafe extern "C" fn() -> *const Functions>(c"vtl_layer") };
    let entry = entry.map_err(|error| error.to_string())?;
    // SAFETY: it takes nothing, and what it returns stays, as the library does.
    let functions = unsafe { entry().as_ref() }.ok_or("vtl_layer() returns nothing")?;
    if functions.abi != ABI || functions.header > MAX_HEADER {
        return Err(format!(
            "it is of version {} with headers of {} bytes, not of version {ABI} with at most {MAX_HEADER}",
            functions.abi, functions.header
        ));
    }
    let complete = || {
        Some(Complete {
            header: functions.header,
            create: functions.create?,
            destroy: functions.destroy?,
            send: functions.send?,
            receive: functions.receive?,
            timed: functions.poll.zip(functions.next_timeout),
        })
    };
    let complete = complete().ok_or("it lacks create, destroy, send or receive")?;
    std::mem::forget(library);
    Ok(complete)
}

/// A layer of a stack.
struct Made {
    functions: Complete,
    state: *mut c_void,
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: `create` has made it, and nobody uses it any more.
        unsafe { (self.functions.destroy)(self.state) }
    }
}

/// What a call may pass on.
struct Passing<'a> {
    out: &'a mut Out,
    /// Longest packet down, bytes.
    longest: usize,
}

/// The packet that a layer passes on; `None`: it is too long.
///
/// # Safety
/// `packet` has `len` bytes.
unsafe fn packet_of(packet: *const u8, len: usize, longest: usize) -> Option<Packet> {
    if len == 0 {
        return Some(Packet::new(&[]));
    }
    if packet.is_null() || len > longest {
        return None;
    }
    // SAFETY: the caller's.
    Some(Packet::new(unsafe {
        std::slice::from_raw_parts(packet, len)
    }))
}

unsafe extern "C" fn down(context: *mut c_void, packet: *const u8, len: usize) {
    // SAFETY: `Made::call` has made the context, and the layer calls this before that returns, by one thread.
    let passing = unsafe { &mut *context.cast::<Passing<'_>>() };
    // SAFETY: by the contract the packet has so many bytes.
    match unsafe { packet_of(packet, len, passing.longest) } {
        Some(packet) => passing.out.down(packet),
        None => passing.out.refuse(),
    }
}

unsafe extern "C" fn up(context: *mut c_void, packet: *const u8, len: usize) {
    // SAFETY: as in `down`.
    let passing = unsafe { &mut *context.cast::<Passing<'_>>() };
    // SAFETY: as in `down`.
    match unsafe { packet_of(packet, len, MAX_PACKET) } {
        Some(packet) => passing.out.up(packet),
        None => passing.out.refuse(),
    }
}

unsafe extern "C" fn refuse(context: *mut c_void) {
    // SAFETY: as in `down`.
    let passing = unsafe { &mut *context.cast::<Passing<'_>>() };
    passing.out.refuse();
}

impl Made {
    /// Has the layer do something that passes on packets.
    fn call(&self, out: &mut Out, longest: usize, act: impl FnOnce(*const CallOut)) {
        let mut passing = Passing { out, longest };
        let out = CallOut {
            context: (&raw mut passing).cast(),
            down,
            up,
            refuse,
        };
        act(&raw const out);
    }

    fn header_len(&self) -> usize {
        self.functions.header as usize
    }
}

impl Layer for Made {
    fn header(&self) -> usize {
        self.header_len()
    }

    fn send(&mut self, now: Ns, packet: Packet, out: &mut Out) {
        let (bytes, longest) = (packet.bytes(), packet.len() + self.header_len());
        self.call(out, longest, |out| {
            // SAFETY: `create` has made the state, the packet has so many bytes, and `out` lives.
            unsafe { (self.functions.send)(self.state, now, bytes.as_ptr(), bytes.len(), out) };
        });
    }

    fn receive(&mut self, now: Ns, packet: Packet, out: &mut Out) {
        let bytes = packet.bytes();
        self.call(out, MAX_PACKET, |out| {
            // SAFETY: as in `send`.
            unsafe { (self.functions.receive)(self.state, now, bytes.as_ptr(), bytes.len(), out) };
        });
    }

    fn poll(&mut self, now: Ns, room: usize, out: &mut Out) {
        if let Some((poll, _)) = self.functions.timed {
            self.call(out, MAX_PACKET, |out| {
                // SAFETY: as in `send`.
                unsafe { poll(self.state, now, room, out) };
            });
        }
    }

    fn next_timeout(&self) -> Option<Ns> {
        let (_, next_timeout) = self.functions.timed?;
        // SAFETY: `create` has made the state.
        let at = unsafe { next_timeout(self.state) };
        (at != u64::MAX).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants__are_the_headers() {
        let header = include_str!("../../../../../../include/vtl-layer.h");
        assert!(header.contains(&format!("#define VTL_LAYER_ABI {ABI}\n")));
        assert!(header.contains(&format!("#define VTL_LAYER_MAX_HEADER {MAX_HEADER}\n")));
    }
}
