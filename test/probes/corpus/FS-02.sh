# id: FS-02
# title: climb above the root with dot-dot
# expect: V the root is its own parent
# timeout: 10
# escaped: ^READ
# safe: ^at=/$

cd / && cd ../../../../../../../..
echo "at=$(pwd -P)"
cat ".$HOST_CANARY" 2>/dev/null && echo READ
cat "/proc/self/root/../../..$HOST_CANARY" 2>/dev/null && echo READ
true
